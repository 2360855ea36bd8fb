"""Mistral: LLaMA's block with one sliding window in every layer (arXiv:2310.06825).

Knows folders; GGUF files of Mistral say "llama" and are read there.
"""

from collections.abc import Mapping
from typing import Any

from model.decoder.spec import DecoderSpec, LayerSpec
from model.families.shared.dense import attention, decoder, gated_mlp, head_dim, rms_norm
from model.families.shared.names import PRE_NORMS, USUAL_NAMES
from model.families.shared.rope import read_rope

PREFIX = "model."
NAMES: Mapping[str, str | None] = USUAL_NAMES | PRE_NORMS


def spec(config: Mapping[str, Any], context: int = 0) -> DecoderSpec:
    """The spec for a configuration with its defaults filled in; `context` is the served one, 0 for the model's own."""
    norm = rms_norm(config)
    layer = LayerSpec(
        attention=attention(
            config, rope=read_rope(config, head_dim(config), context), window=config.get("sliding_window")
        ),
        mlp=gated_mlp(config),
        pre_attention=norm,
        pre_mlp=norm,
    )
    return decoder("mistral", config, [layer] * int(config["num_hidden_layers"]), final_norm=norm)
