"""SmolLM3: LLaMA's block, every fourth layer without positions.

Source of the idea: arXiv:2501.18795.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from model.decoder.spec import DecoderSpec, LayerSpec
from model.families.shared.dense import attention, decoder, gated_mlp, head_dim, rms_norm, windows
from model.families.shared.fused import is_part, pairs_to_halves
from model.families.shared.gguf import usual_config
from model.families.shared.names import PRE_NORMS, USUAL_NAMES, gguf_names
from model.families.shared.rope import read_rope

PREFIX = "model."
NAMES: Mapping[str, str | None] = USUAL_NAMES | PRE_NORMS
GGUF_NAMES = gguf_names()

_INTERVAL = 4  # every so many layers, the last has no positions


def spec(config: Mapping[str, Any], context: int = 0) -> DecoderSpec:
    """The spec for a configuration with its defaults filled in; `context` is the served one, 0 for the model's own."""
    norm = rms_norm(config)
    bias = bool(config.get("attention_bias", False))
    rope = read_rope(config, head_dim(config), context)
    layers = [
        LayerSpec(
            attention=attention(config, rope=rope if turned else None, window=window, qkv_bias=bias, out_bias=bias),
            mlp=gated_mlp(config, bias=bool(config.get("mlp_bias", False))),
            pre_attention=norm,
            pre_mlp=norm,
        )
        for turned, window in zip(config["no_rope_layers"], windows(config), strict=True)
    ]
    return decoder("smollm3", config, layers, final_norm=norm)


def gguf_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The file does not say which layers turn; its readers all use the released models' interval."""
    config = usual_config(metadata)
    turned = [int((layer + 1) % _INTERVAL != 0) for layer in range(config["num_hidden_layers"])]
    return config | {"no_rope_layers": turned}


def gguf_reshape(name: str, data: Tensor, spec: DecoderSpec) -> Mapping[str, Tensor]:
    """GGUF stores q and k for rotary pairs; ours are halves."""
    sizes = spec.layers[0].attention
    for part, heads in (("q", sizes.heads), ("k", sizes.kv_heads)):
        if is_part(name, part):
            return {name: pairs_to_halves(data, heads)}
    return {name: data}
