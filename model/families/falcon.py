"""Falcon: 7B (one key head, side by side), 40B (grouped, two norms), RW (ALiBi, one after the other).

Source: arXiv:2311.16867.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from model.decoder.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec
from model.families.shared.dense import activation
from model.families.shared.fused import interleaved_qkv, is_part, stacked_qkv
from model.families.shared.gguf import usual_config
from model.families.shared.names import gguf_names, with_biases
from model.families.shared.rope import read_rope

PREFIX = "transformer."
_LAYER = "transformer.h.{}."
NAMES: Mapping[str, str | None] = {
    "transformer.word_embeddings.weight": "embedding",
    "lm_head.weight": "head",
    _LAYER + "self_attention.rotary_emb.inv_freq": None,
} | with_biases(
    {
        _LAYER + "input_layernorm": "layers.{}.pre_attention",
        _LAYER + "ln_attn": "layers.{}.pre_attention",
        _LAYER + "ln_mlp": "layers.{}.pre_mlp",
        _LAYER + "post_attention_layernorm": "layers.{}.pre_mlp",
        _LAYER + "self_attention.query_key_value": "layers.{}.attention.qkv",
        _LAYER + "self_attention.dense": "layers.{}.attention.out",
        _LAYER + "mlp.dense_h_to_4h": "layers.{}.mlp.up",
        _LAYER + "mlp.dense_4h_to_h": "layers.{}.mlp.down",
        "transformer.ln_f": "final_norm",
    }
)
GGUF_NAMES = gguf_names(attn_norm="norm_1", attn_norm_2="norm_2")


def spec(config: Mapping[str, Any], context: int = 0) -> DecoderSpec:
    """The spec for a configuration with its defaults filled in; `context` is the served one, 0 for the model's own."""
    width, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    newer, alibi, bias = bool(config["new_decoder_architecture"]), bool(config["alibi"]), bool(config["bias"])
    parallel = newer or bool(config["parallel_attn"])
    norm = NormSpec(kind="layer", eps=float(config["layer_norm_epsilon"]), bias=True)
    two_norms = not parallel or (newer and config.get("num_ln_in_parallel_attn") in (None, 2))
    scale = (width // heads) ** -0.5
    layer = LayerSpec(
        attention=AttentionSpec(
            heads=heads,
            kv_heads=int(config["num_kv_heads"]) if newer else 1 if config["multi_query"] else heads,
            head_dim=width // heads,
            rope=None if alibi else read_rope(config, width // heads, context),
            alibi=alibi,
            alibi_scale=scale if alibi else 1.0,  # its penalty is scaled together with the scores
            qkv_bias=bias,
            out_bias=bias,
        ),
        mlp=MlpSpec(int(config["ffn_hidden_size"]), activation(str(config["activation"])), bias=bias),
        pre_attention=norm,
        pre_mlp=norm if two_norms else None,
        parallel=parallel,
    )
    return DecoderSpec(
        family="falcon",
        vocabulary=int(config["vocab_size"]),
        width=width,
        context=int(config["max_position_embeddings"]),
        layers=(layer,) * int(config["num_hidden_layers"]),
        final_norm=norm,
        tied_head=bool(config.get("tie_word_embeddings", True)),
    )


def reshape(name: str, data: Tensor, spec: DecoderSpec) -> Mapping[str, Tensor]:
    """Each key head stands behind the query heads that share it."""
    return interleaved_qkv(name, data, spec.layers[0].attention) if is_part(name, "qkv") else {name: data}


def gguf_reshape(name: str, data: Tensor, spec: DecoderSpec) -> Mapping[str, Tensor]:
    """GGUF stacks q, k, v; where there are two norms, its first is the feed-forward's."""
    if is_part(name, "qkv"):
        return stacked_qkv(name, data, spec.layers[0].attention)
    first = "pre_attention" if spec.layers[0].pre_mlp is None else "pre_mlp"
    return {name.replace("norm_1", first).replace("norm_2", "pre_attention"): data}


def gguf_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """GGUF holds the 7B and 40B kinds; two norms tell the second."""
    usual = usual_config(metadata)
    newer = "blk.0.attn_norm_2.weight" in metadata["tensor_names"]
    return usual | {
        "new_decoder_architecture": newer,
        "num_kv_heads": usual.get("num_key_value_heads", 1),
        "multi_query": usual.get("num_key_value_heads", 1) == 1,
        "parallel_attn": True,
        "alibi": False,
        "bias": "blk.0.attn_qkv.bias" in metadata["tensor_names"],
        "layer_norm_epsilon": usual["layer_norm_eps"],
        "ffn_hidden_size": usual["intermediate_size"],
        "activation": "gelu",
    }
