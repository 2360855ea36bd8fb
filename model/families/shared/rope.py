"""Rotary positions from a configuration, in either spelling (`rope_scaling` beside `rope_theta`, or `rope_parameters`).

Knows the keys that checkpoints use. Scalings that depend on the total length ("dynamic", "longrope") are
chosen here, once, from the served context: so chunks, prefix hits and replays agree.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

from model.decoder.spec import RopeSpec


def read_rope(
    config: Mapping[str, Any],
    head_dim: int,
    context: int = 0,
    layer_type: str | None = None,
    layout: Literal["halves", "pairs"] = "halves",
) -> RopeSpec:
    """The rope of layers of `layer_type`; `context` 0: the model's own. Raises ValueError for unknown scalings."""
    given = _parameters(config, layer_type)
    kind = given.get("rope_type") or given.get("type") or "default"
    trained = int(config["max_position_embeddings"])
    original = given.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    plain = RopeSpec(
        dim=int(head_dim * (given.get("partial_rotary_factor") or 1.0)),
        base=float(given.get("rope_theta") or 10000.0),
        layout=layout,
    )
    if kind == "default":
        return plain
    fields = dict(vars(plain)) | {"factor": float(given.get("factor") or 1.0)}
    if kind == "linear":
        return RopeSpec(**fields | {"scaling": "linear"})
    if kind == "dynamic":
        served = context or trained
        return RopeSpec(**fields | {"scaling": "dynamic", "original_context": trained, "served_context": served})
    original = int(original or trained)
    if kind in ("longrope", "su"):
        return RopeSpec(**vars(plain) | _longrope(given, trained, original, context or trained))
    fields["original_context"] = original
    if kind == "llama3":
        bands = {"low_factor": float(given["low_freq_factor"]), "high_factor": float(given["high_freq_factor"])}
        return RopeSpec(**fields | bands | {"scaling": "banded"})
    if kind == "yarn":
        return RopeSpec(**fields | _yarn(given, fields["factor"]) | {"scaling": "yarn"})
    raise ValueError(f"the rope scaling {kind!r} is not known; known are linear, dynamic, yarn, llama3, longrope")


def _parameters(config: Mapping[str, Any], layer_type: str | None) -> Mapping[str, Any]:
    """One flat mapping for this type of layer, whichever the spelling."""
    given = config.get("rope_parameters")
    if given and layer_type is not None and isinstance(given.get(layer_type), Mapping):
        return dict(given[layer_type])
    outer = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if config.get(key) is not None}
    return outer | dict(config.get("rope_scaling") or {}) | dict(given or {})


def _yarn(given: Mapping[str, Any], factor: float) -> dict[str, Any]:
    attention_factor = given.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all_dim = given.get("mscale"), given.get("mscale_all_dim")
        attention_factor = _mscale(factor)
        if mscale and mscale_all_dim:
            attention_factor = _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    return {
        "beta_fast": float(given.get("beta_fast") or 32.0),
        "beta_slow": float(given.get("beta_slow") or 1.0),
        "attention_factor": float(attention_factor),
        "truncate": bool(given.get("truncate", True)),
    }


def _mscale(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(given: Mapping[str, Any], trained: int, original: int, served: int) -> dict[str, Any]:
    """The long divisors once the served context exceeds the original one, the short ones up to it."""
    factor = given.get("factor") or trained / original
    attention_factor = given.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original))
    return {
        "scaling": "longrope",
        "attention_factor": float(attention_factor),
        "factors": tuple(float(value) for value in given["long_factor" if served > original else "short_factor"]),
    }
