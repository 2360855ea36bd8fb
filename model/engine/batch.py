"""Batch: a plan's integers become the decoder's tensors. The one place where that happens.

Knows plans, block tables and torch; no requests, no logits. Buffers are allocated once and reused, so what
`build` returns is valid until the next call.
"""

import numpy as np
import torch

from model.decoder.inputs import NO_WINDOW, DecoderInput
from model.engine.plan import Plan, PlanRow
from model.engine.retention import sliding


class BatchBuilder:
    """Buffers for at most `max_tokens` tokens of at most `max_rows` sequences a step."""

    def __init__(self, max_tokens: int, max_rows: int, block_size: int) -> None:
        self._block_size = block_size
        self._ids = np.zeros(max_tokens, np.int64)
        self._positions = np.zeros(max_tokens, np.int64)
        self._slots = np.zeros(max_tokens, np.int64)
        self._query_start = np.zeros(max_rows + 1, np.int32)
        self._tables = np.zeros((max_rows, 16), np.int32)
        self._sink_blocks = np.zeros(max_rows, np.int32)
        self._recent_base = np.zeros(max_rows, np.int64)
        self._sinks = np.zeros(max_rows, np.int32)
        self._windows = np.zeros(max_rows, np.int64)
        self._logit_rows = np.zeros(max_tokens, np.int64)

    def build(self, plan: Plan) -> DecoderInput:
        """The step's tensors; logit rows stand in the plan's order: a row's scored positions, then its last one."""
        entries = max(len(row.sequence.blocks) for row in plan.rows)
        if entries > self._tables.shape[1]:
            self._tables = np.zeros((self._tables.shape[0], max(entries, 2 * self._tables.shape[1])), np.int32)
        tokens = wanted = 0
        for index, row in enumerate(plan.rows):
            self._fill(index, row, tokens)
            if row.score:
                self._logit_rows[wanted : wanted + row.count] = range(tokens, tokens + row.count)
                wanted += row.count
            elif row.sample:
                self._logit_rows[wanted] = tokens + row.count - 1
                wanted += 1
            tokens += row.count
        rows = len(plan.rows)
        self._query_start[rows] = tokens
        tensor = torch.from_numpy
        return DecoderInput(
            ids=tensor(self._ids[:tokens]),
            positions=tensor(self._positions[:tokens]),
            slots=tensor(self._slots[:tokens]),
            query_start=tensor(self._query_start[: rows + 1]),
            block_tables=tensor(np.ascontiguousarray(self._tables[:rows, :entries])),
            sink_blocks=tensor(self._sink_blocks[:rows]),
            recent_base=tensor(self._recent_base[:rows]),
            sinks=tensor(self._sinks[:rows]),
            windows=tensor(self._windows[:rows]),
            logit_rows=tensor(self._logit_rows[:wanted]),
        )

    def _fill(self, index: int, row: PlanRow, at: int) -> None:
        sequence, start, count = row.sequence, row.start, row.count
        retention = sequence.group.submit.retention
        self._query_start[index] = at
        self._tables[index, : len(sequence.blocks)] = sequence.blocks
        self._sink_blocks[index] = sequence.sink_blocks
        self._recent_base[index] = sequence.recent_base
        slides = sliding(retention)
        self._sinks[index] = sequence.sinks if slides else 0
        self._windows[index] = retention.window if slides else NO_WINDOW
        size = self._block_size
        if count == 1:
            logical, offset = divmod(start, size)
            self._ids[at] = sequence.ids(start, 1)[0]
            self._positions[at] = start
            self._slots[at] = sequence.blocks[self._entry(row, logical)] * size + offset
            return
        self._ids[at : at + count] = sequence.ids(start, count)
        positions = np.arange(start, start + count)
        self._positions[at : at + count] = positions
        logicals = positions // size
        shift = sequence.sink_blocks - sequence.recent_base
        entry = np.where(logicals < sequence.sink_blocks, logicals, logicals + shift)
        self._slots[at : at + count] = self._tables[index][entry].astype(np.int64) * size + positions % size

    @staticmethod
    def _entry(row: PlanRow, logical: int) -> int:
        sequence = row.sequence
        inside = logical < sequence.sink_blocks
        return logical if inside else logical - sequence.recent_base + sequence.sink_blocks
