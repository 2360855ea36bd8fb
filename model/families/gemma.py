"""Gemma 1: LLaMA's block with a tanh-GELU gate, a scaled embedding, and norms stored as weight - 1.

Source: arXiv:2403.08295.
"""

import math
from collections.abc import Mapping
from typing import Any

from model.decoder.spec import DecoderSpec, LayerSpec, MlpSpec
from model.families.shared.dense import attention, decoder, head_dim, rms_norm
from model.families.shared.gguf import usual_config
from model.families.shared.names import PRE_NORMS, USUAL_NAMES, gguf_names
from model.families.shared.rope import read_rope

PREFIX = "model."
NAMES: Mapping[str, str | None] = USUAL_NAMES | PRE_NORMS
GGUF_NAMES = gguf_names()


def spec(config: Mapping[str, Any], context: int = 0) -> DecoderSpec:
    """The spec for a configuration with its defaults filled in; `context` is the served one, 0 for the model's own."""
    norm = rms_norm(config, offset=float(config.get("norm_offset", 1.0)))
    bias = bool(config.get("attention_bias", False))
    layer = LayerSpec(
        attention=attention(config, rope=read_rope(config, head_dim(config), context), qkv_bias=bias, out_bias=bias),
        # Released configurations say "gelu" here and mean the tanh form.
        mlp=MlpSpec(width=int(config["intermediate_size"]), activation="gelu_tanh", gated=True),
        pre_attention=norm,
        pre_mlp=norm,
    )
    scale = math.sqrt(config["hidden_size"])
    layers = [layer] * int(config["num_hidden_layers"])
    return decoder("gemma", config, layers, final_norm=norm, embedding_scale=scale)


def gguf_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """GGUF stores the norms with the one added."""
    return usual_config(metadata) | {"norm_offset": 0.0}
