"""Paged attention in torch: online softmax over tiles of keys at absolute positions.

Knows one step's queries and block tables, and a cache [blocks, kv_heads, block_size, head_dim]. Tiles begin at
multiples of their size whatever the table holds, and every product has a multiple of 8 rows, so a
query's result depends neither on its neighbours nor on how its prompt was cut.

    positions  0        T        2T       3T                 (T = tile, a multiple of block_size)
               [s s . .][. . . .][. r r r][r r r r]          s: sink blocks, r: recent blocks, '.': not kept
                tile 0              tile 2   tile 3           tile 1 is not visited
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from model.decoder.inputs import DecoderInput

_TILE = 256
_ROWS = 8
_LOWEST = -1e30  # the running maximum's start: finite, so that a row without a visible key yet is not NaN


@dataclass(frozen=True)
class Queries:
    """Queries rotated at their true position, and at their virtual one (None: the same)."""

    recent: Tensor  # [tokens, heads, head_dim]
    sink: Tensor | None


class Group:
    """Sequences with equally many queries in this step, longest first; all tensors on the device."""

    def __init__(self, inputs: DecoderInput, members: list[int], block_size: int, device: torch.device) -> None:
        per_tile = max(1, _TILE // block_size)
        per_tile += -per_tile % (_ROWS // math.gcd(_ROWS, block_size))  # tiles a multiple of 8 long
        self.tile = per_tile * block_size
        tables = {member: _tiles(inputs, member, per_tile, block_size) for member in members}
        members = sorted(members, key=lambda member: -len(tables[member]))
        self.counts = [len(tables[member]) for member in members]
        blocks = torch.zeros(len(members), self.counts[0], per_tile, dtype=torch.int64)
        starts = torch.zeros(len(members), self.counts[0], dtype=torch.int64)
        for row, member in enumerate(members):
            for column, (tile, row_blocks) in enumerate(sorted(tables[member].items())):
                blocks[row, column] = torch.tensor(row_blocks)
                starts[row, column] = tile * self.tile
        first = inputs.query_start[members].to(torch.int64)
        self.queries = int(inputs.query_start[members[0] + 1] - inputs.query_start[members[0]])
        self.tokens = (first.unsqueeze(1) + torch.arange(self.queries)).flatten().to(device)  # [sequences * queries]
        self.positions = inputs.positions.to(device)[self.tokens].view(len(members), self.queries)
        self.sinks = inputs.sinks[members].to(device, torch.int64)  # [sequences]
        self.windows = inputs.windows[members].to(device)
        self.max_sinks = int(inputs.sinks[members].max())
        self.gaps = [part[members].to(device, torch.int64) * block_size for part in _gap(inputs)]  # [sequences] each
        self.blocks, self.starts = blocks.to(device), starts.to(device)
        self.sink_tiles = [bool((starts[:, tile] < self.max_sinks).any()) for tile in range(self.counts[0])]
        self._cells: dict[tuple[int, int], Tensor] = {}
        self._hidden: dict[tuple[int, int | None, int], Tensor | None] = {}

    def active(self, tile: int) -> int:
        """How many sequences have that many tiles: a prefix of the group."""
        return sum(count > tile for count in self.counts)

    def gather(self, cache: Tensor, tile: int) -> Tensor:
        """The tile's rows of the cache: [active * kv_heads, T, head_dim]."""
        _, kv_heads, _, width = cache.shape
        cells = self._cells.get((tile, kv_heads))
        if cells is None:
            blocks = self.blocks[: self.active(tile), tile].unsqueeze(1)  # [active, 1, blocks a tile]
            heads = torch.arange(kv_heads, device=blocks.device).view(1, -1, 1)
            cells = self._cells[tile, kv_heads] = (blocks * kv_heads + heads).flatten()
        return cache.flatten(0, 1).index_select(0, cells).view(-1, self.tile, width)

    def narrowed(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Each sequence's window and sinks in a layer with this trained window: [sequences] both.

        Retention counts where its window is smaller; elsewhere the layer keeps its trained mask, without sinks.
        """
        if window is None:
            return self.windows, self.sinks
        return self.windows.clamp(max=window), torch.where(self.windows < window, self.sinks, 0)

    def keys(self, tile: int) -> Tensor:
        """Positions of the tile's keys: [active, 1, T]."""
        starts = self.starts[: self.active(tile), tile]
        return (starts.unsqueeze(1) + torch.arange(self.tile, device=starts.device)).unsqueeze(1)

    def hidden(self, tile: int, window: int | None, heads: int, rows: int) -> Tensor | None:
        """True where a query (its `heads` rows) must not see a key: [active, 1, rows, T]; None if it sees all."""
        found = self._hidden.get((tile, window, heads), _UNKNOWN)
        if found is not _UNKNOWN:
            return found
        active = self.active(tile)
        windows, sinks = (part[:active].view(-1, 1, 1) for part in self.narrowed(window))
        keys, queries = self.keys(tile), self.positions[:active].unsqueeze(2)
        first, end = (part[:active].view(-1, 1, 1) for part in self.gaps)
        kept = (end <= first) | (keys >= end) | (keys < sinks)
        visible = kept & (keys <= queries) & ((keys > queries - windows) | (keys < sinks))  # [active, queries, T]
        mask = None
        if not bool(visible.all()):
            mask = (~visible).repeat_interleave(heads, dim=1)
            mask = functional.pad(mask, (0, 0, 0, rows - mask.shape[1])).unsqueeze(1)
        self._hidden[tile, window, heads] = mask
        return mask

    def distances(self, tile: int, window: int | None) -> Tensor:
        """How far each key lies behind each query, virtually for sink keys: int64 [active, queries, T]."""
        active = self.active(tile)
        windows, sinks = (part[:active].view(-1, 1, 1) for part in self.narrowed(window))
        keys, queries = self.keys(tile), self.positions[:active].unsqueeze(2)
        virtual = torch.where(keys < sinks, torch.minimum(queries, sinks + windows - 1), queries)
        return virtual - keys


_UNKNOWN = torch.empty(0)


class PagedAttention:
    """Attention of one step, for every layer."""

    def __init__(self, inputs: DecoderInput, block_size: int, device: torch.device, dtype: torch.dtype) -> None:
        by_count: dict[int, list[int]] = {}
        for sequence, count in enumerate(inputs.query_start.diff().tolist()):
            # Sequences of many queries go alone: their length would be padding for the others.
            by_count.setdefault(count if count == 1 else -sequence - 1, []).append(sequence)
        self._groups = [Group(inputs, members, block_size, device) for members in by_count.values()]
        self._dtype = dtype

    def attend(
        self,
        queries: Queries,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        alibi_slopes: Tensor | None,
        sink_logits: Tensor | None,
    ) -> Tensor:
        """[tokens, heads, head_dim] from keys and values [blocks, kv_heads, block_size, padded head_dim]."""
        result = torch.empty_like(queries.recent)
        for group in self._groups:
            layer = _GroupAttention(group, queries, keys, scale, window, softcap, alibi_slopes, self._dtype)
            result.index_copy_(0, group.tokens, layer.mix(keys, values, sink_logits))
        return result


class _GroupAttention:
    """One layer, one group. A kv head's rows: query after query, each with the heads that share it, then padding."""

    def __init__(
        self,
        group: Group,
        queries: Queries,
        keys: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        alibi_slopes: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        self._group, self._window, self._softcap, self._dtype = group, window, softcap, dtype
        self._kv_heads = keys.shape[1]
        self._heads = queries.recent.shape[1] // self._kv_heads  # query heads that share a kv head
        self._head_dim = queries.recent.shape[2]
        self._rows = -(-group.queries * self._heads // _ROWS) * _ROWS
        self._recent = self._arrange(queries.recent * scale, keys)
        self._sink = None if queries.sink is None else self._arrange(queries.sink * scale, keys)
        self._slopes = None if alibi_slopes is None else alibi_slopes.view(1, self._kv_heads, 1, self._heads, 1)
        self._narrowed_sinks = group.narrowed(window)[1]

    def mix(self, keys: Tensor, values: Tensor, sink_logits: Tensor | None) -> Tensor:
        """Online softmax (Milakov & Gimelshein 2018, arXiv:1805.02867): [tokens of the group, heads, head_dim]."""
        group, shape = self._group, (len(self._group.counts), self._kv_heads, self._rows, 1)
        device = keys.device
        top = torch.full(shape, _LOWEST, dtype=self._dtype, device=device)
        total = torch.zeros(shape, dtype=self._dtype, device=device)
        mixed = torch.zeros(*shape[:3], values.shape[-1], dtype=self._dtype, device=device)
        if sink_logits is not None:  # one more column, whose value is nothing
            column = sink_logits.view(1, self._kv_heads, 1, self._heads).expand(shape[0], -1, group.queries, -1)
            top[:, :, : group.queries * self._heads] = column.reshape(shape[0], self._kv_heads, -1, 1)
            total.fill_(1.0)
        for tile in range(group.counts[0]):
            active = group.active(tile)
            scores = self._scores(tile, group.gather(keys, tile))  # [active, kv_heads, rows, T]
            before = top[:active]
            after = torch.maximum(before, scores.amax(dim=-1, keepdim=True))
            weights, decay = torch.exp(scores - after), torch.exp(before - after)
            part = torch.bmm(weights.flatten(0, 1).to(values.dtype), group.gather(values, tile))
            total[:active] = total[:active] * decay + weights.sum(dim=-1, keepdim=True)
            mixed[:active] = mixed[:active] * decay + part.view(active, *mixed.shape[1:])
            top[:active] = after
        mixed = (mixed / total)[:, :, : group.queries * self._heads, : self._head_dim]
        mixed = mixed.view(shape[0], self._kv_heads, group.queries, self._heads, self._head_dim)
        return mixed.transpose(1, 2).reshape(-1, self._kv_heads * self._heads, self._head_dim)

    def _scores(self, tile: int, keys: Tensor) -> Tensor:
        """Masked scores of the tile: [active, kv_heads, rows, T]."""
        group, active = self._group, self._group.active(tile)
        scores = self._product(self._recent, active, keys)
        if self._sink is not None and group.sink_tiles[tile]:
            is_sink = group.keys(tile).unsqueeze(1) < self._narrowed_sinks[:active].view(-1, 1, 1, 1)
            scores = torch.where(is_sink, self._product(self._sink, active, keys), scores)
        if self._softcap is not None:
            scores = self._softcap * torch.tanh(scores / self._softcap)
        if self._slopes is not None:
            distances = group.distances(tile, self._window).to(self._dtype)  # [active, queries, T]
            penalty = (self._slopes * distances[:, None, :, None]).flatten(
                2, 3
            )  # [active, kv_heads, queries * heads, T]
            scores[:, :, : penalty.shape[2]] -= penalty
        hidden = group.hidden(tile, self._window, self._heads, self._rows)
        return scores if hidden is None else scores.masked_fill(hidden, -torch.inf)

    def _product(self, queries: Tensor, active: int, keys: Tensor) -> Tensor:
        scores = torch.bmm(queries[:active].flatten(0, 1), keys.transpose(1, 2))
        return scores.to(self._dtype).view(active, self._kv_heads, self._rows, -1)

    def _arrange(self, queries: Tensor, keys: Tensor) -> Tensor:
        """[tokens, heads, head_dim] → [sequences, kv_heads, rows, padded head_dim] in the cache's type."""
        group = self._group
        chosen = queries.index_select(0, group.tokens)
        chosen = chosen.view(-1, group.queries, self._kv_heads, self._heads, self._head_dim).transpose(1, 2)
        chosen = chosen.reshape(len(group.counts), self._kv_heads, -1, self._head_dim).to(keys.dtype)
        return functional.pad(chosen, (0, keys.shape[-1] - self._head_dim, 0, self._rows - chosen.shape[2]))


def _gap(inputs: DecoderInput) -> tuple[Tensor, Tensor]:
    """Logical blocks from the first up to the second are not in the table; see `inputs.py` for what is seen then."""
    return inputs.sink_blocks, inputs.recent_base


def _tiles(inputs: DecoderInput, sequence: int, per_tile: int, block_size: int) -> dict[int, list[int]]:
    """The tiles a sequence holds blocks of: tile number → its blocks, 0 where none is kept.

    See the table's layout in `inputs.py`.
    """
    last = int(inputs.positions[int(inputs.query_start[sequence + 1]) - 1])
    sink_blocks, base = int(inputs.sink_blocks[sequence]), int(inputs.recent_base[sequence])
    used = last // block_size - base + 1 + sink_blocks if last // block_size >= base else last // block_size + 1
    tiles: dict[int, list[int]] = {}
    for entry, block in enumerate(inputs.block_tables[sequence, :used].tolist()):
        logical = entry if entry < sink_blocks else base + entry - sink_blocks
        tile, place = divmod(logical, per_tile)
        tiles.setdefault(tile, [0] * per_tile)[place] = block
    return tiles
