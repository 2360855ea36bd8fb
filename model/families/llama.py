"""LLaMA 1, 2, 3, 3.1 and later, and what is built like it (SmolLM, Vicuna, …).

Sources: arXiv:2302.13971, arXiv:2407.21783.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from model.decoder.spec import DecoderSpec, LayerSpec
from model.families.shared.dense import attention, decoder, gated_mlp, head_dim, rms_norm
from model.families.shared.fused import is_part, pairs_to_halves
from model.families.shared.gguf import usual_config
from model.families.shared.names import PRE_NORMS, USUAL_NAMES, gguf_names
from model.families.shared.rope import read_rope

PREFIX = "model."
NAMES: Mapping[str, str | None] = USUAL_NAMES | PRE_NORMS
GGUF_NAMES = gguf_names()


def spec(config: Mapping[str, Any], context: int = 0) -> DecoderSpec:
    """The spec for a configuration with its defaults filled in; `context` is the served one, 0 for the model's own."""
    bias = bool(config.get("attention_bias", False))
    norm = rms_norm(config)
    layer = LayerSpec(
        attention=attention(
            config, rope=read_rope(config, head_dim(config), context), qkv_bias=bias, out_bias=_out_bias(config, bias)
        ),
        mlp=gated_mlp(config, bias=bool(config.get("mlp_bias", False))),
        pre_attention=norm,
        pre_mlp=norm,
    )
    return decoder("llama", config, [layer] * int(config["num_hidden_layers"]), final_norm=norm)


def gguf_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """GGUF's "llama" also holds Mistral's models, without their window (they were made before it was stored)."""
    config = usual_config(metadata)
    config["attention_out_bias"] = "blk.0.attn_output.bias" in metadata["tensor_names"]
    return config


def gguf_reshape(name: str, data: Tensor, spec: DecoderSpec) -> Mapping[str, Tensor]:
    """GGUF stores q and k for rotary pairs; ours are halves."""
    sizes = spec.layers[0].attention
    for part, heads in (("q", sizes.heads), ("k", sizes.kv_heads)):
        if is_part(name, part):
            return {name: pairs_to_halves(data, heads)}
    return {name: data}


def _out_bias(config: Mapping[str, Any], qkv_bias: bool) -> bool:
    return bool(config.get("attention_out_bias", qkv_bias))
