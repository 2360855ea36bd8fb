"""Phi-3 and Phi-4-mini: LLaMA's block with fused projections, and long-context rope divisors.

Source: arXiv:2404.14219.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from model.decoder.spec import DecoderSpec, LayerSpec
from model.families.shared.dense import attention, decoder, gated_mlp, head_dim, rms_norm
from model.families.shared.fused import is_part, stacked_gate_up, stacked_qkv
from model.families.shared.gguf import usual_config
from model.families.shared.names import PRE_NORMS, USUAL_NAMES, gguf_names
from model.families.shared.rope import read_rope

PREFIX = "model."
NAMES: Mapping[str, str | None] = (
    USUAL_NAMES
    | PRE_NORMS
    | {
        "model.layers.{}.self_attn.qkv_proj.weight": "layers.{}.attention.qkv",
        "model.layers.{}.mlp.gate_up_proj.weight": "layers.{}.mlp.gate_up",
    }
)
GGUF_NAMES = gguf_names(ffn_up="mlp.gate_up")


def spec(config: Mapping[str, Any], context: int = 0) -> DecoderSpec:
    """The spec for a configuration with its defaults filled in; `context` is the served one, 0 for the model's own."""
    norm = rms_norm(config)
    layer = LayerSpec(
        attention=attention(
            config, rope=read_rope(config, head_dim(config), context), window=config.get("sliding_window")
        ),
        mlp=gated_mlp(config),
        pre_attention=norm,
        pre_mlp=norm,
    )
    return decoder("phi3", config, [layer] * int(config["num_hidden_layers"]), final_norm=norm)


def reshape(name: str, data: Tensor, spec: DecoderSpec) -> Mapping[str, Tensor]:
    """Folders and GGUF alike stack q, k, v and the gate with the up projection."""
    if is_part(name, "qkv"):
        return stacked_qkv(name, data, spec.layers[0].attention)
    return stacked_gate_up(name, data) if is_part(name, "gate_up") else {name: data}


gguf_reshape = reshape


def gguf_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A window of 0 in the file is none."""
    config = usual_config(metadata)
    config["sliding_window"] = config.get("sliding_window") or None
    return config
