"""Batch: a plan's integers become the decoder's tensors. The one place where that happens.

Knows plans, block tables and torch; no requests, no logits. Buffers are allocated once and reused, so what
`build` returns is valid until the next call.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from model.decoder.inputs import NO_WINDOW, DecoderInput
from model.engine.plan import Plan, PlanRow
from model.engine.retention import sliding


class _Buffer:
    """A numpy array and the tensor over the same memory."""

    def __init__(self, size: int, dtype: type) -> None:
        self.array: NDArray[Any] = np.zeros(size, dtype)
        self.tensor = torch.from_numpy(self.array)


class BatchBuilder:
    """Buffers for at most `max_tokens` tokens of at most `max_rows` sequences a step."""

    def __init__(self, max_tokens: int, max_rows: int, block_size: int) -> None:
        self._block_size = block_size
        self._ids = _Buffer(max_tokens, np.int64)
        self._positions = _Buffer(max_tokens, np.int64)
        self._slots = _Buffer(max_tokens, np.int64)
        self._logit_rows = _Buffer(max_tokens, np.int64)
        self._query_start = _Buffer(max_rows + 1, np.int32)
        self._sink_blocks = _Buffer(max_rows, np.int32)
        self._recent_base = _Buffer(max_rows, np.int64)
        self._sinks = _Buffer(max_rows, np.int32)
        self._windows = _Buffer(max_rows, np.int64)
        self._tables = np.zeros((max_rows, 16), np.int32)
        self._offsets = np.arange(max_tokens)

    def build(self, plan: Plan) -> DecoderInput:
        """The step's tensors; logit rows stand in the plan's order: a row's scored positions, then its last one."""
        rows = plan.rows
        entries = max(len(row.sequence.blocks) for row in rows)
        if entries > self._tables.shape[1]:
            self._tables = np.zeros((self._tables.shape[0], max(entries, 2 * self._tables.shape[1])), np.int32)
        tokens = wanted = 0
        logit_rows = self._logit_rows.array
        for index, row in enumerate(rows):
            self._fill(index, row, tokens)
            end = tokens + row.count
            if row.score:
                logit_rows[wanted : wanted + row.count] = self._offsets[tokens:end]
                wanted += row.count
            elif row.sample:
                logit_rows[wanted] = end - 1
                wanted += 1
            tokens = end
        count = len(rows)
        self._query_start.array[count] = tokens
        return DecoderInput(
            ids=self._ids.tensor[:tokens],
            positions=self._positions.tensor[:tokens],
            slots=self._slots.tensor[:tokens],
            query_start=self._query_start.tensor[: count + 1],
            block_tables=torch.from_numpy(self._tables[:count, :entries].copy()),
            sink_blocks=self._sink_blocks.tensor[:count],
            recent_base=self._recent_base.tensor[:count],
            sinks=self._sinks.tensor[:count],
            windows=self._windows.tensor[:count],
            logit_rows=self._logit_rows.tensor[:wanted],
        )

    def _fill(self, index: int, row: PlanRow, at: int) -> None:
        sequence, start, count = row.sequence, row.start, row.count
        retention = sequence.group.submit.retention
        blocks, size = sequence.blocks, self._block_size
        table = self._tables[index]
        table[: len(blocks)] = np.frombuffer(blocks, np.int32)
        self._query_start.array[index] = at
        self._sink_blocks.array[index] = sequence.sink_blocks
        self._recent_base.array[index] = sequence.recent_base
        slides = sliding(retention)
        self._sinks.array[index] = sequence.sinks if slides else 0
        self._windows.array[index] = retention.window if slides else NO_WINDOW
        if count == 1:
            self._ids.array[at] = sequence.ids(start, 1)[0]
            self._positions.array[at] = start
            self._slots.array[at] = blocks[sequence.entry(start // size)] * size + start % size
            return
        end = at + count
        self._ids.array[at:end] = np.frombuffer(sequence.ids(start, count), np.int32)
        positions = self._offsets[:count] + start
        self._positions.array[at:end] = positions
        logical = positions // size
        entry = np.where(
            logical < sequence.sink_blocks, logical, logical - (sequence.recent_base - sequence.sink_blocks)
        )
        self._slots.array[at:end] = table[entry].astype(np.int64) * size + positions % size
