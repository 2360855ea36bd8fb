"""Ops in torch for one step: each call runs at once and returns a tensor.

Knows one step's tensors; not weights' forms (they multiply themselves) nor how attention walks the cache.
The step's rows are padded to a multiple of 8 once, so that all products are row-invariant; padding rows
carry id 0, are never stored and never returned.
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from model.decoder.inputs import DecoderInput
from model.decoder.kernels.reference_attention import PagedAttention, Queries
from model.decoder.rope import inverse_frequencies, rotate, rotation
from model.decoder.spec import NormSpec, RopeSpec

ROWS = 8


class Store(Protocol):
    """The cache as this file sees it: [blocks, kv_heads, block_size, padded head_dim] a layer."""

    block_size: int
    keys: list[Tensor]
    values: list[Tensor]


def round_up(count: int, multiple: int) -> int:
    """The next multiple at or above `count`."""
    return -(-count // multiple) * multiple


class Step:
    """One step's arithmetic; implements `Ops`. X is a tensor [rows, width]."""

    def __init__(self, inputs: DecoderInput, store: Store, device: torch.device, dtype: torch.dtype) -> None:
        self._store = store
        self._dtype = dtype
        self._count = inputs.ids.shape[0]
        pad = round_up(self._count, ROWS) - self._count
        self._ids = functional.pad(inputs.ids, (0, pad)).to(device)
        self._positions = functional.pad(inputs.positions, (0, pad)).to(device)
        self._slots = inputs.slots.to(device)
        rows = inputs.logit_rows.shape[0]
        self._logit_rows = functional.pad(inputs.logit_rows, (0, round_up(rows, ROWS) - rows)).to(device)
        virtual = virtual_positions(inputs)
        self._virtual = None if virtual is None else functional.pad(virtual, (0, pad)).to(device)
        self._attention = PagedAttention(inputs, store.block_size, device, dtype)
        self._rotations: dict[tuple[RopeSpec, bool], tuple[Tensor, Tensor]] = {}
        self._cells: dict[int, Tensor] = {}

    def embed(self, weight: Any, scale: float) -> Tensor:
        x: Tensor = weight.rows(self._ids, self._dtype)  # [rows, width]
        return x if scale == 1.0 else x * scale

    def add_positions(self, x: Tensor, table: Tensor, offset: int) -> Tensor:
        return x + table.index_select(0, self._positions + offset)

    def norm(self, x: Tensor, spec: NormSpec, weight: Tensor | None, bias: Tensor | None, groups: int = 1) -> Tensor:
        parts = x.reshape(x.shape[0], groups, x.shape[1] // groups)  # [rows, groups, size]; rows may be none
        if spec.kind == "layer":
            parts = parts - parts.mean(dim=-1, keepdim=True)
        parts = parts * torch.rsqrt(parts.square().mean(dim=-1, keepdim=True) + spec.eps)
        if weight is not None:
            parts = parts * weight
        if bias is not None:
            parts = parts + bias
        return parts.reshape(x.shape)

    def linear(self, x: Tensor, parts: Sequence[Any], biases: Sequence[Tensor | None]) -> Tensor:
        results = []
        for part, bias in zip(parts, biases, strict=True):
            result = part.product(x)
            results.append(result if bias is None else result + bias)
        return results[0] if len(results) == 1 else torch.cat(results, dim=-1)

    def activate(self, x: Tensor, kind: str, gated: bool) -> Tensor:
        if not gated:
            return _activation(x, kind)
        gate, up = x.chunk(2, dim=-1)
        return _activation(gate, kind) * up

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x * factor

    def clip(self, x: Tensor, limit: float) -> Tensor:
        return x.clamp(-limit, limit)

    def split(self, x: Tensor, widths: Sequence[int]) -> Sequence[Tensor]:
        return torch.split(x, list(widths), dim=-1)

    def rotate_and_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        layer: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rope: RopeSpec | None,
    ) -> Queries:
        query = q.reshape(-1, heads, head_dim)  # [rows, heads, head_dim]
        key = k.reshape(-1, kv_heads, head_dim)
        turned = query
        if rope is not None:
            cos, sin = self._rotation(rope, virtual=False)
            turned, key = rotate(query, rope, cos, sin), rotate(key, rope, cos, sin)
        self._write(self._store.keys[layer], key)
        self._write(self._store.values[layer], v.reshape(-1, kv_heads, head_dim))
        if rope is None or self._virtual is None:
            return Queries(turned[: self._count], None)
        cos, sin = self._rotation(rope, virtual=True)
        return Queries(turned[: self._count], rotate(query, rope, cos, sin)[: self._count])

    def attend(
        self,
        q: Queries,
        *,
        layer: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None,
        softcap: float | None,
        alibi_slopes: Tensor | None,
        sink_logits: Tensor | None,
    ) -> Tensor:
        mixed = self._attention.attend(
            q,
            self._store.keys[layer],
            self._store.values[layer],
            scale=scale,
            window=window,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sink_logits=sink_logits,
        )  # [tokens, heads, head_dim]
        return functional.pad(mixed.reshape(self._count, -1), (0, 0, 0, self._ids.shape[0] - self._count))

    def select_rows(self, x: Tensor) -> Tensor:
        return x.index_select(0, self._logit_rows)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return cap * torch.tanh(x / cap)

    def _rotation(self, rope: RopeSpec, virtual: bool) -> tuple[Tensor, Tensor]:
        """cos and sin for this step's rows, computed once for all layers with the same rope."""
        found = self._rotations.get((rope, virtual))
        if found is None:
            positions = self._virtual if virtual and self._virtual is not None else self._positions
            frequencies = inverse_frequencies(rope).to(positions.device)
            found = self._rotations[rope, virtual] = rotation(rope, positions, frequencies, self._dtype)
        return found

    def _write(self, cache: Tensor, rows: Tensor) -> None:
        """Put rows [rows, kv_heads, head_dim] into their slots of the cache."""
        _, kv_heads, block_size, width = cache.shape
        cells = self._cells.get(kv_heads)
        if cells is None:
            block, place = self._slots // block_size, self._slots % block_size
            heads = torch.arange(kv_heads, device=cache.device)
            cells = ((block.unsqueeze(1) * kv_heads + heads) * block_size + place.unsqueeze(1)).flatten()
            self._cells[kv_heads] = cells  # [tokens * kv_heads]
        rows = functional.pad(rows[: self._count].to(cache.dtype), (0, width - rows.shape[-1]))
        cache.view(-1, width).index_copy_(0, cells, rows.reshape(-1, width))


def virtual_positions(inputs: DecoderInput) -> Tensor | None:
    """int64 [tokens]: where each query stands for its sink keys, or None when no sequence has sinks.

    min(p, sinks + window - 1) under retention: the place the query would have in a cache that holds
    nothing but the sinks and the recent window (Xiao et al. 2023, arXiv:2309.17453, section 3.2).
    """
    if not bool(inputs.sinks.any()):
        return None
    counts = inputs.query_start.diff().to(torch.int64)
    limits = torch.where(inputs.sinks > 0, inputs.sinks + inputs.windows - 1, torch.iinfo(torch.int64).max)
    return torch.minimum(inputs.positions, limits.repeat_interleave(counts))


def _activation(x: Tensor, kind: str) -> Tensor:
    """From torch's primitives: its own fused forms compute the last few entries of a tensor in another way than the
    rest, so a row's bits would depend on how many rows there are (measured)."""
    if kind == "relu":
        return functional.relu(x)
    if kind == "silu":
        return x / (1.0 + torch.exp(-x))
    if kind == "gelu":
        return 0.5 * x * (1.0 + torch.erf(x * math.sqrt(0.5)))
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))
