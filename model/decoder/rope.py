"""Rotary positions: frequencies and angles, in float64 so that position 10**7 is as exact as position 1.

Knows formulas (Su et al. 2021, arXiv:2104.09864, and the scalings below); not who rotates what.
"""

import math

import torch
from torch import Tensor

from model.decoder.spec import RopeSpec


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """float64 [dim / 2]: radians a position for each pair of entries, scaling applied."""
    if spec.scaling == "dynamic":
        return _powers(spec.dim, _grown_base(spec))
    plain = _powers(spec.dim, spec.base)
    if spec.scaling == "linear":  # positions divided by the factor (Chen et al. 2023, arXiv:2306.15595)
        return plain / spec.factor
    if spec.scaling == "yarn":
        return _yarn(spec, plain)
    if spec.scaling == "banded":
        return _banded(spec, plain)
    if spec.scaling == "longrope":  # a divisor for each pair (Ding et al. 2024, arXiv:2402.13753)
        return plain / torch.tensor(spec.factors, dtype=torch.float64)
    return plain


def rotation(spec: RopeSpec, positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, each [tokens, dim / 2] in `dtype`, times the attention factor; angles in float64."""
    angles = positions.to(torch.float64).unsqueeze(1) * frequencies  # [tokens, dim / 2]
    return (angles.cos() * spec.attention_factor).to(dtype), (angles.sin() * spec.attention_factor).to(dtype)


def rotate(x: Tensor, spec: RopeSpec, cos: Tensor, sin: Tensor) -> Tensor:
    """x [tokens, heads, head_dim] with the first `dim` entries of each head rotated.

    "halves" pairs entry i with i + dim / 2; "pairs" pairs entry 2i with 2i + 1.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [tokens, 1, dim / 2]
    turned, rest = x[..., : spec.dim], x[..., spec.dim :]
    if spec.layout == "halves":
        first, second = turned.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
    first, second = turned[..., 0::2], turned[..., 1::2]
    pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((pairs.flatten(-2), rest), dim=-1)


def _powers(dim: int, base: float) -> Tensor:
    return torch.pow(base, -torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def _grown_base(spec: RopeSpec) -> float:
    """Dynamic NTK: the base that keeps the slowest pair's total turn when the context grows past the trained one."""
    context = max(spec.served_context, spec.original_context)
    growth = spec.factor * context / spec.original_context - (spec.factor - 1.0)
    return float(spec.base * growth ** (spec.dim / (spec.dim - 2)))


def _yarn(spec: RopeSpec, plain: Tensor) -> Tensor:
    """Fast pairs as trained, slow ones interpolated, a ramp between (Peng et al. 2023, arXiv:2309.00071, eq. 23)."""

    def pair_of(turns: float) -> float:
        wavelength = spec.original_context / (turns * 2 * math.pi)
        return spec.dim * math.log(wavelength) / (2 * math.log(spec.base))

    low, high = pair_of(spec.beta_fast), pair_of(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    pairs = torch.arange(spec.dim // 2, dtype=torch.float64)
    ramp = ((pairs - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return plain / spec.factor * ramp + plain * (1.0 - ramp)


def _banded(spec: RopeSpec, plain: Tensor) -> Tensor:
    """Short wavelengths as trained, long ones divided by the factor, a smooth band between."""
    turns = spec.original_context * plain / (2 * math.pi)  # full turns within the original context
    smooth = ((turns - spec.low_factor) / (spec.high_factor - spec.low_factor)).clamp(0.0, 1.0)
    return plain * smooth + plain / spec.factor * (1.0 - smooth)
