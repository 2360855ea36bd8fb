"""Qwen 2, 2.5 and 3: LLaMA's block with biases on q, k, v (2), or norms on each head of q and k (3).

Sources: arXiv:2407.10671, arXiv:2505.09388. Some layers may have a sliding window.
"""

from collections.abc import Mapping
from typing import Any

from model.decoder.spec import DecoderSpec, LayerSpec
from model.families.shared.dense import attention, decoder, gated_mlp, head_dim, rms_norm, windows
from model.families.shared.gguf import usual_config
from model.families.shared.names import HEAD_NORMS, PRE_NORMS, USUAL_NAMES, gguf_names
from model.families.shared.rope import read_rope

PREFIX = "model."
NAMES: Mapping[str, str | None] = USUAL_NAMES | PRE_NORMS | HEAD_NORMS
GGUF_NAMES = gguf_names()


def spec(config: Mapping[str, Any], context: int = 0) -> DecoderSpec:
    """The spec for a configuration with its defaults filled in; `context` is the served one, 0 for the model's own."""
    third = config["model_type"] == "qwen3"
    norm = rms_norm(config)
    bias = bool(config.get("attention_bias", False)) if third else True
    rope = read_rope(config, head_dim(config), context)
    layers = [
        LayerSpec(
            attention=attention(
                config,
                rope=rope,
                window=window,
                qkv_bias=bias,
                out_bias=bias and third,
                qk_norm=norm if third else None,
            ),
            mlp=gated_mlp(config),
            pre_attention=norm,
            pre_mlp=norm,
        )
        for window in windows(config)
    ]
    return decoder("qwen", config, layers, final_norm=norm)


def gguf_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The usual keys serve; files carry no windows for these models."""
    return usual_config(metadata)
