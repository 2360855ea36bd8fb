"""BLOOM: ALiBi, a norm after the embedding, q, k, v of a head together.

Source: arXiv:2211.05100.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from model.decoder.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec
from model.families.shared.fused import interleaved_qkv, is_part, stacked_qkv
from model.families.shared.gguf import usual_config
from model.families.shared.names import gguf_names, with_biases

PREFIX = "transformer."
_LAYER = "transformer.h.{}."
NAMES: Mapping[str, str | None] = {
    "transformer.word_embeddings.weight": "embedding",
    "lm_head.weight": "head",
} | with_biases(
    {
        "transformer.word_embeddings_layernorm": "embedding_norm",
        _LAYER + "input_layernorm": "layers.{}.pre_attention",
        _LAYER + "post_attention_layernorm": "layers.{}.pre_mlp",
        _LAYER + "self_attention.query_key_value": "layers.{}.attention.qkv",
        _LAYER + "self_attention.dense": "layers.{}.attention.out",
        _LAYER + "mlp.dense_h_to_4h": "layers.{}.mlp.up",
        _LAYER + "mlp.dense_4h_to_h": "layers.{}.mlp.down",
        "transformer.ln_f": "final_norm",
    }
)
GGUF_NAMES = gguf_names()

_CONTEXT = 2048  # trained length, which released configurations do not state


def spec(config: Mapping[str, Any], context: int = 0) -> DecoderSpec:
    """The spec for a configuration with its defaults filled in; `context` changes nothing here."""
    if config.get("apply_residual_connection_post_layernorm", False):
        raise ValueError("BLOOM models whose residual starts after the norm are not served")
    width, heads = int(config["hidden_size"]), int(config["n_head"])
    norm = NormSpec(kind="layer", eps=float(config["layer_norm_epsilon"]), bias=True)
    layer = LayerSpec(
        attention=AttentionSpec(heads, heads, width // heads, alibi=True, qkv_bias=True, out_bias=True),
        mlp=MlpSpec(width=4 * width, activation="gelu_tanh", bias=True),
        pre_attention=norm,
        pre_mlp=norm,
    )
    return DecoderSpec(
        family="bloom",
        vocabulary=int(config["vocab_size"]),
        width=width,
        context=int(config.get("seq_length") or _CONTEXT),
        layers=(layer,) * int(config["n_layer"]),
        final_norm=norm,
        embedding_norm=norm,
        tied_head=bool(config.get("tie_word_embeddings", True)),
    )


def reshape(name: str, data: Tensor, spec: DecoderSpec) -> Mapping[str, Tensor]:
    """q, k, v of a head stand together."""
    return interleaved_qkv(name, data, spec.layers[0].attention) if is_part(name, "qkv") else {name: data}


def gguf_reshape(name: str, data: Tensor, spec: DecoderSpec) -> Mapping[str, Tensor]:
    """GGUF stacks all q, all k, all v."""
    return stacked_qkv(name, data, spec.layers[0].attention) if is_part(name, "qkv") else {name: data}


def gguf_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The usual keys under this family's names."""
    usual = usual_config(metadata)
    return {
        "hidden_size": usual["hidden_size"],
        "n_head": usual["num_attention_heads"],
        "n_layer": usual["num_hidden_layers"],
        "seq_length": usual["max_position_embeddings"],
        "layer_norm_epsilon": usual["layer_norm_eps"],
        "vocab_size": usual["vocab_size"],
        "tie_word_embeddings": usual["tie_word_embeddings"],
    }
