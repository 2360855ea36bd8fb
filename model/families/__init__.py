"""The families by the names checkpoints give them.

Knows which module serves which name; a family is a module, see `Family` for what it offers.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from model.decoder.spec import DecoderSpec
from model.families import (
    bloom,
    exaone4,
    falcon,
    gemma,
    gemma2,
    gpt2,
    gpt_neox,
    gptj,
    llama,
    mistral,
    mpt,
    olmo2,
    opt,
    phi3,
    qwen,
    smollm3,
    xglm,
)


class Family(Protocol):
    """A family's file. `NAMES`: checkpoint name ({} is the layer) to ours, None where dropped on purpose.

    Optional: `PREFIX`, what a bare base model's names lack; `reshape(name, data, spec)`, which cuts or turns a
    tensor (under our name) into our parameters.
    """

    NAMES: Mapping[str, str | None]

    def spec(self, config: Mapping[str, Any], context: int = 0) -> DecoderSpec:
        """The spec for a configuration with its defaults filled in, served up to `context` tokens (0: its own)."""


class GgufFamily(Family, Protocol):
    """A family whose GGUF files can be read. Optional: `gguf_reshape`, as `reshape`."""

    GGUF_NAMES: Mapping[str, str | None]

    def gguf_config(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """The file's metadata as the configuration that `spec` reads."""


BY_MODEL_TYPE: dict[str, Family] = {
    "bloom": bloom,
    "exaone4": exaone4,
    "falcon": falcon,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3_text": gemma2,
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
    "gptj": gptj,
    "llama": llama,
    "mistral": mistral,
    "mpt": mpt,
    "olmo2": olmo2,
    "opt": opt,
    "phi3": phi3,
    "qwen2": qwen,
    "qwen3": qwen,
    "smollm3": smollm3,
    "xglm": xglm,
}
BY_GGUF_ARCHITECTURE: dict[str, GgufFamily] = {
    "bloom": bloom,
    "exaone4": exaone4,
    "falcon": falcon,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3": gemma2,
    "gpt2": gpt2,
    "gptneox": gpt_neox,
    "llama": llama,
    "mpt": mpt,
    "olmo2": olmo2,
    "phi3": phi3,
    "qwen2": qwen,
    "qwen3": qwen,
    "smollm3": smollm3,
}
