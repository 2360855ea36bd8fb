"""Cutting fused matrices into ours, by rows only: so it works on float rows and on rows of quantised bytes alike.

Knows layouts of rows; `data` is [rows, …] (a bias is [rows]).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from model.decoder.spec import AttentionSpec


def renamed(name: str, fused: str, part: str) -> str:
    """`name` with its fused piece replaced: "….attention.qkv.bias" → "….attention.q.bias"."""
    return ".".join(part if piece == fused else piece for piece in name.split("."))


def is_part(name: str, part: str) -> bool:
    """Whether one of the name's dotted pieces is `part`."""
    return part in name.split(".")


def stacked_qkv(name: str, data: Tensor, spec: AttentionSpec) -> Mapping[str, Tensor]:
    """All queries, then all keys, then all values."""
    inner, kv_inner = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    parts = torch.split(data, [inner, kv_inner, kv_inner])
    return {renamed(name, "qkv", part): rows for part, rows in zip("qkv", parts, strict=True)}


def interleaved_qkv(name: str, data: Tensor, spec: AttentionSpec) -> Mapping[str, Tensor]:
    """For each kv head its query heads, its key, its value (with one query head a kv head: q, k, v, q, k, v, …)."""
    shared = spec.heads // spec.kv_heads
    groups = data.reshape(spec.kv_heads, shared + 2, spec.head_dim, *data.shape[1:])
    parts = torch.split(groups, [shared, 1, 1], dim=1)
    return {
        renamed(name, "qkv", part): rows.reshape(-1, *data.shape[1:]) for part, rows in zip("qkv", parts, strict=True)
    }


def stacked_gate_up(name: str, data: Tensor) -> Mapping[str, Tensor]:
    """The gate's rows, then the up projection's."""
    gate, up = data.chunk(2)
    return {renamed(name, "gate_up", "gate"): gate, renamed(name, "gate_up", "up"): up}


def pairs_to_halves(data: Tensor, heads: int) -> Tensor:
    """Rows of q or k stored for rotary pairs (2i, 2i + 1), put in the order of halves (i, i + head_dim / 2)."""
    rows = data.reshape(heads, -1, 2, *data.shape[1:])
    return rows.transpose(1, 2).reshape(data.shape)
