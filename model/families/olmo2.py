"""OLMo 2: norms after attention and feed-forward only, and over the full width of q and k.

Source: arXiv:2501.00656.
"""

from collections.abc import Mapping
from typing import Any

from model.decoder.spec import DecoderSpec, LayerSpec
from model.families.shared.dense import attention, decoder, gated_mlp, head_dim, rms_norm
from model.families.shared.gguf import usual_config
from model.families.shared.names import HEAD_NORMS, POST_NORMS, USUAL_NAMES, gguf_names
from model.families.shared.rope import read_rope

PREFIX = "model."
NAMES: Mapping[str, str | None] = USUAL_NAMES | POST_NORMS | HEAD_NORMS
GGUF_NAMES = gguf_names()


def spec(config: Mapping[str, Any], context: int = 0) -> DecoderSpec:
    """The spec for a configuration with its defaults filled in; `context` is the served one, 0 for the model's own."""
    norm = rms_norm(config)
    bias = bool(config.get("attention_bias", False))
    layer = LayerSpec(
        attention=attention(
            config,
            rope=read_rope(config, head_dim(config), context),
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=norm,
            qk_norm_full_width=True,
        ),
        mlp=gated_mlp(config),
        post_attention=norm,
        post_mlp=norm,
    )
    return decoder("olmo2", config, [layer] * int(config["num_hidden_layers"]), final_norm=norm)


def gguf_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The usual keys serve."""
    return usual_config(metadata)
