"""XGLM: sinusoidal positions that are computed, not stored, and a scaled embedding.

Source: arXiv:2112.10668.
"""

import math
from collections.abc import Mapping
from typing import Any

from model.decoder.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec, PositionSpec
from model.families.shared.dense import activation
from model.families.shared.names import with_biases

PREFIX = "model."
_LAYER = "model.layers.{}."
NAMES: Mapping[str, str | None] = {
    "model.embed_tokens.weight": "embedding",
    "model.embed_positions.weights": None,  # sinusoids, which old files stored
    "lm_head.weight": "head",
} | with_biases(
    {
        "model.layer_norm": "final_norm",
        **{f"{_LAYER}self_attn.{part}_proj": f"layers.{{}}.attention.{part}" for part in ("q", "k", "v", "out")},
        _LAYER + "self_attn_layer_norm": "layers.{}.pre_attention",
        _LAYER + "final_layer_norm": "layers.{}.pre_mlp",
        _LAYER + "fc1": "layers.{}.mlp.up",
        _LAYER + "fc2": "layers.{}.mlp.down",
    }
)

_OFFSET = 2  # sinusoids are counted from here


def spec(config: Mapping[str, Any], context: int = 0) -> DecoderSpec:
    """The spec for a configuration with its defaults filled in; `context` changes nothing here."""
    width, heads = int(config["d_model"]), int(config["attention_heads"])
    norm = NormSpec(kind="layer", bias=True)
    layer = LayerSpec(
        attention=AttentionSpec(heads, heads, width // heads, qkv_bias=True, out_bias=True),
        mlp=MlpSpec(int(config["ffn_dim"]), activation(str(config["activation_function"])), bias=True),
        pre_attention=norm,
        pre_mlp=norm,
    )
    return DecoderSpec(
        family="xglm",
        vocabulary=int(config["vocab_size"]),
        width=width,
        context=int(config["max_position_embeddings"]),
        layers=(layer,) * int(config["num_layers"]),
        final_norm=norm,
        embedding_scale=math.sqrt(width) if config.get("scale_embedding", True) else 1.0,
        positions=PositionSpec("sinusoidal", count=int(config["max_position_embeddings"]), offset=_OFFSET),
        tied_head=bool(config.get("tie_word_embeddings", True)),
    )
