"""The families by the names checkpoints give them. A family is a module; see `Family` for what it offers."""

from collections.abc import Mapping
from typing import Any, Protocol

from model.decoder.spec import DecoderSpec
from model.families import llama


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


BY_MODEL_TYPE: dict[str, Family] = {"llama": llama}
BY_GGUF_ARCHITECTURE: dict[str, GgufFamily] = {"llama": llama}
