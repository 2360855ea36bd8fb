"""Specs of the common dense decoder (norms, heads, feed-forward) from a configuration's usual keys.

Knows the keys' usual names (hidden_size, num_attention_heads, …); a family states what differs.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from model.decoder.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]

_ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


def activation(name: str) -> Activation:
    """Ours for a configuration's name; raises ValueError for one the decoder does not have."""
    if name not in _ACTIVATIONS:
        raise ValueError(f"the activation {name!r} is not known; known are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def head_dim(config: Mapping[str, Any]) -> int:
    """Entries a head: stated, or the width divided by the heads."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def attention(config: Mapping[str, Any], **fields: Any) -> AttentionSpec:
    """Heads, kv heads and their size from the usual keys; `fields` are the spec's other fields."""
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key heads evenly")
    return AttentionSpec(heads=heads, kv_heads=kv_heads, head_dim=head_dim(config), **fields)


def gated_mlp(config: Mapping[str, Any], bias: bool = False) -> MlpSpec:
    """The gated feed-forward of `intermediate_size`."""
    name = config.get("hidden_act") or config.get("hidden_activation") or "silu"
    return MlpSpec(width=int(config["intermediate_size"]), activation=activation(name), gated=True, bias=bias)


def rms_norm(config: Mapping[str, Any], **fields: Any) -> NormSpec:
    """RMSNorm with the configuration's epsilon."""
    return NormSpec(kind="rms", eps=float(config["rms_norm_eps"]), **fields)


def windows(config: Mapping[str, Any]) -> list[int | None]:
    """Each layer's trained window, from `layer_types` and `sliding_window`."""
    window = config.get("sliding_window")
    kinds = config.get("layer_types") or ["full_attention"] * int(config["num_hidden_layers"])
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(f"the attention {sorted(unknown)[0]!r} is not known; known are full and sliding attention")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def decoder(family: str, config: Mapping[str, Any], layers: Sequence[LayerSpec], **fields: Any) -> DecoderSpec:
    """The whole spec from the usual keys; `fields` are the spec's other fields.

    With a rope that grows with the served context, that is the context.
    """
    ropes = [layer.attention.rope for layer in layers if layer.attention.rope is not None]
    grown = max((rope.served_context for rope in ropes), default=0)
    return DecoderSpec(
        family=family,
        vocabulary=int(config["vocab_size"]),
        width=int(config["hidden_size"]),
        context=max(int(config["max_position_embeddings"]), grown),
        layers=tuple(layers),
        tied_head=bool(config.get("tie_word_embeddings", False)),
        **fields,
    )
