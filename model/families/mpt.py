"""MPT: ALiBi, LayerNorm without bias, optional clipping of q, k, v (MosaicML 2023).

Knows the ALiBi models; those with learned positions were never released and are refused.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from model.decoder.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec
from model.families.shared.fused import is_part, stacked_qkv
from model.families.shared.gguf import usual_config
from model.families.shared.names import gguf_names

PREFIX = "transformer."
_LAYER = "transformer.blocks.{}."
NAMES: Mapping[str, str | None] = {
    "transformer.wte.weight": "embedding",
    "transformer.norm_f.weight": "final_norm",
    "lm_head.weight": "head",
    _LAYER + "norm_1.weight": "layers.{}.pre_attention",
    _LAYER + "norm_2.weight": "layers.{}.pre_mlp",
    _LAYER + "attn.Wqkv.weight": "layers.{}.attention.qkv",
    _LAYER + "attn.out_proj.weight": "layers.{}.attention.out",
    _LAYER + "ffn.up_proj.weight": "layers.{}.mlp.up",
    _LAYER + "ffn.down_proj.weight": "layers.{}.mlp.down",
}
GGUF_NAMES = gguf_names()


def spec(config: Mapping[str, Any], context: int = 0) -> DecoderSpec:
    """The spec for a configuration with its defaults filled in; `context` changes nothing here."""
    width, heads = int(config["d_model"]), int(config["n_heads"])
    details: Mapping[str, Any] = config["attn_config"]
    if not details.get("alibi", True) or details.get("qk_ln", False) or not config.get("no_bias", True):
        raise ValueError("MPT models without ALiBi, with biases, or with norms on q and k are not served")
    norm = NormSpec(kind="layer", eps=float(config["layer_norm_epsilon"]))
    layer = LayerSpec(
        attention=AttentionSpec(
            heads=heads,
            kv_heads=heads,
            head_dim=width // heads,
            alibi=True,
            alibi_max=float(details.get("alibi_bias_max", 8)),
            clip_qkv=details.get("clip_qkv") or None,
            scale=details.get("softmax_scale") or None,
        ),
        mlp=MlpSpec(width=int(config.get("expansion_ratio", 4) * width), activation="gelu"),
        pre_attention=norm,
        pre_mlp=norm,
    )
    return DecoderSpec(
        family="mpt",
        vocabulary=int(config["vocab_size"]),
        width=width,
        context=int(config["max_seq_len"]),
        layers=(layer,) * int(config["n_layers"]),
        final_norm=norm,
        tied_head=bool(config.get("tie_word_embeddings", True)),
        logit_scale=_logit_scale(config.get("logit_scale"), width),
    )


def reshape(name: str, data: Tensor, spec: DecoderSpec) -> Mapping[str, Tensor]:
    """q, k, v are stacked."""
    return stacked_qkv(name, data, spec.layers[0].attention) if is_part(name, "qkv") else {name: data}


gguf_reshape = reshape


def gguf_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The usual keys under this family's names."""
    usual = usual_config(metadata)
    details = {
        "alibi_bias_max": metadata.get("mpt.attention.max_alibi_bias", 8.0),
        "clip_qkv": metadata.get("mpt.attention.clamp_kqv"),
    }
    return {
        "d_model": usual["hidden_size"],
        "n_heads": usual["num_attention_heads"],
        "n_layers": usual["num_hidden_layers"],
        "max_seq_len": usual["max_position_embeddings"],
        "expansion_ratio": usual["intermediate_size"] / usual["hidden_size"],
        "layer_norm_epsilon": usual["layer_norm_eps"],
        "vocab_size": usual["vocab_size"],
        "tie_word_embeddings": usual["tie_word_embeddings"],
        "attn_config": details,
    }


def _logit_scale(value: Any, width: int) -> float:
    """A number, "inv_sqrt_d_model", or nothing."""
    if value is None:
        return 1.0
    return float(width**-0.5 if value == "inv_sqrt_d_model" else value)
