"""EXAONE 4: norms after only, norms on each head of q and k; where layers alternate, global ones have no positions.

Source: arXiv:2507.11407.
"""

from collections.abc import Mapping
from typing import Any

from model.decoder.spec import DecoderSpec, LayerSpec
from model.families.shared.dense import attention, decoder, gated_mlp, head_dim, rms_norm, windows
from model.families.shared.gguf import usual_config
from model.families.shared.names import HEAD_NORMS, POST_NORMS, USUAL_NAMES, gguf_names
from model.families.shared.rope import read_rope

PREFIX = "model."
NAMES: Mapping[str, str | None] = USUAL_NAMES | POST_NORMS | HEAD_NORMS
GGUF_NAMES = gguf_names()

_INTERVAL = 4  # in the hybrid models every so many layers, the last is global


def spec(config: Mapping[str, Any], context: int = 0) -> DecoderSpec:
    """The spec for a configuration with its defaults filled in; `context` is the served one, 0 for the model's own."""
    norm = rms_norm(config)
    rope = read_rope(config, head_dim(config), context)
    hybrid = config.get("sliding_window") is not None
    layers = [
        LayerSpec(
            attention=attention(config, rope=None if hybrid and window is None else rope, window=window, qk_norm=norm),
            mlp=gated_mlp(config),
            post_attention=norm,
            post_mlp=norm,
        )
        for window in windows(config)
    ]
    return decoder("exaone4", config, layers, final_norm=norm)


def gguf_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A file with a window is of a hybrid model; which layers are global is not in it."""
    config = usual_config(metadata)
    if config.get("sliding_window"):
        kinds = ("sliding_attention", "full_attention")
        count = range(config["num_hidden_layers"])
        config["layer_types"] = [kinds[(layer + 1) % _INTERVAL == 0] for layer in count]
    return config
