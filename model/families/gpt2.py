"""GPT-2: learned positions, LayerNorm, fused qkv, weights stored [in, out].

Source: Radford et al. 2019. Learned positions end where their table does.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from model.decoder.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec, PositionSpec
from model.families.shared.dense import activation
from model.families.shared.fused import is_part, stacked_qkv
from model.families.shared.gguf import usual_config
from model.families.shared.names import gguf_names, with_biases

PREFIX = "transformer."
NAMES: Mapping[str, str | None] = {
    "transformer.wte.weight": "embedding",
    "transformer.wpe.weight": "positions",
    "lm_head.weight": "head",
    "transformer.h.{}.attn.bias": None,  # the causal mask, which old files stored
    "transformer.h.{}.attn.masked_bias": None,
} | with_biases(
    {
        "transformer.h.{}.ln_1": "layers.{}.pre_attention",
        "transformer.h.{}.attn.c_attn": "layers.{}.attention.qkv",
        "transformer.h.{}.attn.c_proj": "layers.{}.attention.out",
        "transformer.h.{}.ln_2": "layers.{}.pre_mlp",
        "transformer.h.{}.mlp.c_fc": "layers.{}.mlp.up",
        "transformer.h.{}.mlp.c_proj": "layers.{}.mlp.down",
        "transformer.ln_f": "final_norm",
    }
)
GGUF_NAMES = gguf_names()


def spec(config: Mapping[str, Any], context: int = 0) -> DecoderSpec:
    """The spec for a configuration with its defaults filled in. Learned positions end where the table does."""
    width, heads = int(config["n_embd"]), int(config["n_head"])
    norm = NormSpec(kind="layer", eps=float(config["layer_norm_epsilon"]), bias=True)
    scale = (width // heads) ** -0.5 if config.get("scale_attn_weights", True) else 1.0
    by_layer = bool(config.get("scale_attn_by_inverse_layer_idx", False))
    name = str(config.get("activation_function", "gelu_new"))
    mlp = MlpSpec(width=int(config.get("n_inner") or 4 * width), activation=activation(name), bias=True)
    layers = [
        LayerSpec(
            attention=AttentionSpec(
                heads=heads,
                kv_heads=heads,
                head_dim=width // heads,
                qkv_bias=True,
                out_bias=True,
                scale=scale / (layer + 1) if by_layer else scale,
            ),
            mlp=mlp,
            pre_attention=norm,
            pre_mlp=norm,
        )
        for layer in range(int(config["n_layer"]))
    ]
    return DecoderSpec(
        family="gpt2",
        vocabulary=int(config["vocab_size"]),
        width=width,
        context=int(config["n_positions"]),
        layers=tuple(layers),
        final_norm=norm,
        positions=PositionSpec(kind="learned", count=int(config["n_positions"])),
        tied_head=bool(config.get("tie_word_embeddings", True)),
    )


def reshape(name: str, data: Tensor, spec: DecoderSpec) -> Mapping[str, Tensor]:
    """Matrices inside the blocks are stored [in, out]."""
    if data.ndim == 2 and (is_part(name, "attention") or is_part(name, "mlp")):
        data = data.T
    return gguf_reshape(name, data, spec)


def gguf_reshape(name: str, data: Tensor, spec: DecoderSpec) -> Mapping[str, Tensor]:
    """GGUF stores them [out, in]; q, k, v are stacked."""
    return stacked_qkv(name, data, spec.layers[0].attention) if is_part(name, "qkv") else {name: data}


def gguf_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The usual keys under this family's names."""
    usual = usual_config(metadata)
    return {
        "n_embd": usual["hidden_size"],
        "n_head": usual["num_attention_heads"],
        "n_layer": usual["num_hidden_layers"],
        "n_inner": usual["intermediate_size"],
        "n_positions": usual["max_position_embeddings"],
        "layer_norm_epsilon": usual["layer_norm_eps"],
        "vocab_size": usual["vocab_size"],
        "tie_word_embeddings": usual["tie_word_embeddings"],
    }
