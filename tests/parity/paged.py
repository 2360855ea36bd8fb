"""A small driver of the decoder for parity tests: sequences of any length through a paged cache, batched as one likes.

Stands where the engine will stand, with nothing of its cleverness: it hands out scrambled blocks, and under
retention gives back what fell out. Freed blocks are overwritten, so a kernel that looks at one is caught.
"""

from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

import torch
from torch import Tensor

from model.decoder.decoder import Decoder
from model.decoder.inputs import NO_WINDOW, DecoderInput
from model.decoder.kernels import Backend
from model.decoder.kernels.reference import ReferenceStore

RUBBISH = 1e4


@dataclass
class Stream:
    """One sequence: how many tokens are in the cache, and which block holds which part."""

    sinks: int = 0
    window: int = NO_WINDOW
    length: int = 0
    blocks: dict[int, int] = field(default_factory=dict)


class Paged:
    """A decoder, a cache, and its free blocks."""

    def __init__(self, decoder: Decoder, backend: Backend, num_blocks: int = 96, block_size: int = 4) -> None:
        self.decoder = decoder
        self.block_size = block_size
        self.store = backend.new_kv_store(decoder.spec, num_blocks, block_size)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
        self.free: list[int] = order

    def step(self, parts: Ids[tuple[Stream, Ids[int]]], all_rows: bool = True, last: int | None = None) -> list[Tensor]:
        """Run one batch: for each part its logits, [new tokens, vocabulary]; all_rows off: of its last token alone.

        `last` asks for the logits of that many last tokens instead.
        """
        size = self.block_size
        ids, positions, slots, starts, rows, wanted = [], [], [], [0], [], []
        for stream, new in parts:
            for token in new:
                block = stream.blocks.get(stream.length // size)
                if block is None:
                    block = stream.blocks[stream.length // size] = self.free.pop()
                ids.append(token)
                positions.append(stream.length)
                slots.append(block * size + stream.length % size)
                stream.length += 1
            count = (len(new) if all_rows else 1) if last is None else last
            wanted.append(count)
            rows.extend(range(len(ids) - count, len(ids)))
            starts.append(len(ids))
        tables, sink_blocks, bases = zip(*(self._table(stream, len(new)) for stream, new in parts), strict=True)
        width = max(map(len, tables))
        inputs = DecoderInput(
            ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            query_start=torch.tensor(starts, dtype=torch.int32),
            block_tables=torch.tensor([[*table, *[0] * (width - len(table))] for table in tables], dtype=torch.int32),
            sink_blocks=torch.tensor(sink_blocks, dtype=torch.int32),
            recent_base=torch.tensor(bases),
            sinks=torch.tensor([stream.sinks for stream, _ in parts], dtype=torch.int32),
            windows=torch.tensor([stream.window for stream, _ in parts]),
            logit_rows=torch.tensor(rows, dtype=torch.int64),
        )
        logits = self.decoder.run(inputs, self.store)
        return list(logits.split(wanted))

    def _table(self, stream: Stream, new: int) -> tuple[list[int], int, int]:
        """The compact block table, after giving back what no query of this step can see any more."""
        size = self.block_size
        sink_blocks = -(-stream.sinks // size)
        oldest = max(0, stream.length - new - stream.window + 1) // size
        for logical in [logical for logical in stream.blocks if sink_blocks <= logical < oldest]:
            self.give_back(stream.blocks.pop(logical))
        base = min((logical for logical in stream.blocks if logical >= sink_blocks), default=sink_blocks)
        kept = [stream.blocks[logical] for logical in sorted(stream.blocks)]
        return kept, sink_blocks, base

    def give_back(self, block: int) -> None:
        """Free a block and spoil it."""
        if isinstance(self.store, ReferenceStore):
            for part in (*self.store.keys, *self.store.values):
                part[block] = RUBBISH
        else:
            self.store.spoil(block)
        self.free.insert(0, block)
