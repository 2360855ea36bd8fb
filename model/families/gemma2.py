"""Gemma 2 and 3: norms before and after, local and global layers; soft caps (2), head norms and two rope bases (3).

Sources: arXiv:2408.00118, arXiv:2503.19786. Of Gemma 3 the text model only. Norms are stored as weight - 1.
"""

import math
from collections.abc import Mapping
from typing import Any

from model.decoder.spec import DecoderSpec, LayerSpec
from model.families.shared.dense import attention, decoder, gated_mlp, head_dim, rms_norm, windows
from model.families.shared.gguf import usual_config
from model.families.shared.names import HEAD_NORMS, USUAL_NAMES, gguf_names
from model.families.shared.rope import read_rope

PREFIX = "model."
NAMES: Mapping[str, str | None] = (
    USUAL_NAMES
    | HEAD_NORMS
    | {
        "model.layers.{}.input_layernorm.weight": "layers.{}.pre_attention",
        "model.layers.{}.post_attention_layernorm.weight": "layers.{}.post_attention",
        "model.layers.{}.pre_feedforward_layernorm.weight": "layers.{}.pre_mlp",
        "model.layers.{}.post_feedforward_layernorm.weight": "layers.{}.post_mlp",
    }
)
GGUF_NAMES = gguf_names()

_KINDS = ("sliding_attention", "full_attention")


def spec(config: Mapping[str, Any], context: int = 0) -> DecoderSpec:
    """The spec for a configuration with its defaults filled in; `context` is the served one, 0 for the model's own."""
    third = config["model_type"] != "gemma2"
    norm = rms_norm(config, offset=float(config.get("norm_offset", 1.0)))
    bias = bool(config.get("attention_bias", False))
    ropes = {kind: read_rope(config, head_dim(config), context, layer_type=kind) for kind in _KINDS}
    layers = [
        LayerSpec(
            attention=attention(
                config,
                rope=ropes[kind],
                window=window,
                qkv_bias=bias,
                out_bias=bias,
                qk_norm=norm if third else None,
                softcap=config.get("attn_logit_softcapping"),
                scale=config["query_pre_attn_scalar"] ** -0.5,
            ),
            mlp=gated_mlp(config),
            pre_attention=norm,
            post_attention=norm,
            pre_mlp=norm,
            post_mlp=norm,
        )
        for kind, window in zip(config["layer_types"], windows(config), strict=True)
    ]
    return decoder(
        "gemma3" if third else "gemma2",
        config,
        layers,
        final_norm=norm,
        embedding_scale=math.sqrt(config["hidden_size"]),
        logit_softcap=config.get("final_logit_softcapping"),
    )


def gguf_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Layer pattern, local rope base and the large models' query scale are not in the file: every reader knows them."""
    config = usual_config(metadata)
    architecture, count = config["model_type"], config["num_hidden_layers"]
    interval = 2 if architecture == "gemma2" else 6
    config["layer_types"] = [_KINDS[(layer + 1) % interval == 0] for layer in range(count)]
    largest = 46 if architecture == "gemma2" else 62
    per_head = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = per_head if count == largest else config["head_dim"]
    config["norm_offset"] = 0.0
    config["hidden_activation"] = "gelu_pytorch_tanh"
    config["attn_logit_softcapping"] = metadata.get(f"{architecture}.attn_logit_softcapping")
    config["final_logit_softcapping"] = metadata.get(f"{architecture}.final_logit_softcapping")
    if architecture == "gemma3":
        scaling = config.pop("rope_scaling", {"rope_type": "default"})
        config["rope_parameters"] = {
            "full_attention": scaling | {"rope_theta": config.pop("rope_theta", 1e6)},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }
    return config
