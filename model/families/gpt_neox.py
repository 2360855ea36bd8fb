"""GPT-NeoX (Pythia, Polyglot-Ko): side by side with two norms; rotary halves on part of each head.

Source: arXiv:2204.06745.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from model.decoder.spec import DecoderSpec, LayerSpec, MlpSpec, NormSpec
from model.families.shared.dense import activation, attention, decoder, head_dim
from model.families.shared.fused import interleaved_qkv, is_part, stacked_qkv
from model.families.shared.gguf import usual_config
from model.families.shared.names import gguf_names, with_biases
from model.families.shared.rope import read_rope

PREFIX = "gpt_neox."
_LAYER = "gpt_neox.layers.{}."
NAMES: Mapping[str, str | None] = {
    "gpt_neox.embed_in.weight": "embedding",
    "embed_out.weight": "head",
    "lm_head.weight": "head",  # newer files' name for it
    _LAYER + "attention.bias": None,  # the causal mask and the angles, which old files stored
    _LAYER + "attention.masked_bias": None,
    _LAYER + "attention.rotary_emb.inv_freq": None,
} | with_biases(
    {
        _LAYER + "input_layernorm": "layers.{}.pre_attention",
        _LAYER + "post_attention_layernorm": "layers.{}.pre_mlp",
        _LAYER + "attention.query_key_value": "layers.{}.attention.qkv",
        _LAYER + "attention.dense": "layers.{}.attention.out",
        _LAYER + "mlp.dense_h_to_4h": "layers.{}.mlp.up",
        _LAYER + "mlp.dense_4h_to_h": "layers.{}.mlp.down",
        "gpt_neox.final_layer_norm": "final_norm",
    }
)
GGUF_NAMES = gguf_names()


def spec(config: Mapping[str, Any], context: int = 0) -> DecoderSpec:
    """The spec for a configuration with its defaults filled in; `context` is the served one, 0 for the model's own."""
    norm = NormSpec(kind="layer", eps=float(config["layer_norm_eps"]), bias=True)
    bias = bool(config.get("attention_bias", True))
    layer = LayerSpec(
        attention=attention(config, rope=read_rope(config, head_dim(config), context), qkv_bias=bias, out_bias=bias),
        mlp=MlpSpec(int(config["intermediate_size"]), activation(str(config["hidden_act"])), bias=True),
        pre_attention=norm,
        pre_mlp=norm,
        parallel=bool(config.get("use_parallel_residual", True)),
    )
    return decoder("gpt_neox", config, [layer] * int(config["num_hidden_layers"]), final_norm=norm)


def reshape(name: str, data: Tensor, spec: DecoderSpec) -> Mapping[str, Tensor]:
    """q, k, v of a head stand together."""
    return interleaved_qkv(name, data, spec.layers[0].attention) if is_part(name, "qkv") else {name: data}


def gguf_reshape(name: str, data: Tensor, spec: DecoderSpec) -> Mapping[str, Tensor]:
    """GGUF stacks all q, all k, all v."""
    return stacked_qkv(name, data, spec.layers[0].attention) if is_part(name, "qkv") else {name: data}


def gguf_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The usual keys, and whether the residual is parallel."""
    parallel = bool(metadata.get("gptneox.use_parallel_residual", True))
    return usual_config(metadata) | {"use_parallel_residual": parallel, "hidden_act": "gelu", "attention_bias": True}
