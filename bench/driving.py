"""Drives a decoder without the engine: sequences through a paged cache, one step at a time.

Knows DecoderInput and blocks that are handed out in order; no scheduling, no sampling. For measurements only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from model.decoder.inputs import NO_WINDOW, DecoderInput
from model.decoder.kernels import Backend, KVStore
from model.decoder.kernels.cpu.kv_store import CpuStore
from model.decoder.spec import DecoderSpec

BLOCK = 16


class Runs(Protocol):
    """A decoder, as far as a driver cares."""

    spec: DecoderSpec

    def run(self, inputs: DecoderInput, store: KVStore) -> Tensor:
        """Logits of one step."""


@dataclass
class Course:
    """One sequence: how long it is and which blocks it has."""

    length: int = 0
    blocks: list[int] = field(default_factory=list)


class Driver:
    """A decoder with a cache of `tokens` tokens."""

    def __init__(self, decoder: Runs, backend: Backend, tokens: int) -> None:
        self._decoder = decoder
        self._store = backend.new_kv_store(decoder.spec, tokens // BLOCK + 1, BLOCK)
        self._free = list(range(tokens // BLOCK + 1))

    def prepare(self, parts: Sequence[tuple[Course, Sequence[int]]], all_rows: bool = False) -> DecoderInput:
        """The input of a step that brings each course its new tokens."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        rows: list[int] = []
        starts = [0]
        for course, new in parts:
            for token in new:
                if course.length % BLOCK == 0:
                    course.blocks.append(self._free.pop())
                ids.append(token)
                positions.append(course.length)
                slots.append(course.blocks[-1] * BLOCK + course.length % BLOCK)
                course.length += 1
            rows.extend(range(starts[-1], len(ids)) if all_rows else [len(ids) - 1])
            starts.append(len(ids))
        width = max(len(course.blocks) for course, _ in parts)
        tables = [course.blocks + [0] * (width - len(course.blocks)) for course, _ in parts]
        count = len(parts)
        return DecoderInput(
            ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            query_start=torch.tensor(starts, dtype=torch.int32),
            block_tables=torch.tensor(tables, dtype=torch.int32),
            sink_blocks=torch.zeros(count, dtype=torch.int32),
            recent_base=torch.zeros(count, dtype=torch.int64),
            sinks=torch.zeros(count, dtype=torch.int32),
            windows=torch.full((count,), NO_WINDOW),
            logit_rows=torch.tensor(rows),
        )

    def run(self, inputs: DecoderInput) -> Tensor:
        """Logits of one step."""
        return self._decoder.run(inputs, self._store)

    def soak(self) -> None:
        """Write every slot of a cache of float16 (all 1.06): a page never written is not read from memory."""
        if isinstance(self._store, CpuStore):
            for layer in self._store.layers:
                layer.fill_(0x3C)

    def pretend(self, course: Course, tokens: int) -> None:
        """Give a course this much context without computing it; `soak` the cache first, so that it is real memory."""
        while len(course.blocks) * BLOCK < tokens:
            course.blocks.append(self._free.pop())
        course.length = tokens

    def give_back(self, course: Course) -> None:
        """Free a sequence's blocks."""
        self._free += course.blocks
        course.blocks, course.length = [], 0
