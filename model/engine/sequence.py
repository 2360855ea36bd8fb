"""Sequence: one choice of one request as the scheduler sees it; Group: the request; TokenLog: a stream's ids.

Mutable state lives here and nowhere else. Knows ids and block numbers; no tensors, no policy decisions.

A position is where the model computes a token; under "restart" a stream's later segments begin again at
position 0 with the sinks, so position and place in the stream differ by `segment_start - sinks`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from model.engine.prefix_cache import Chain
from model.protocol import Submit

_SLACK = 4096  # ids dropped at a time, at most


class TokenLog:
    """A stream's ids, four bytes each: all of them, or the first `keep_head` and at least the last `keep_tail`."""

    __slots__ = ("_base", "_head", "_ids", "_keep_head", "_keep_tail")

    def __init__(
        self,
        ids: Iterable[int],
        keep_head: int = 0,
        keep_tail: int = 0,
        base: int = 0,
        head: Iterable[int] | None = None,
    ) -> None:
        """`ids` stand at places base, base + 1, ... of the stream; `keep_tail` 0 keeps everything."""
        self._ids = array("i", ids)
        self._base = base
        self._head = (self._ids if head is None else array("i", head))[:keep_head]
        self._keep_head = keep_head
        self._keep_tail = keep_tail

    def __len__(self) -> int:
        return self._base + len(self._ids)

    @property
    def available_from(self) -> int:
        """From this place on every id is known."""
        return self._base

    def keep_tail(self, count: int) -> None:
        """Keep at least the last `count` ids from now on."""
        self._keep_tail = count

    @property
    def num_held(self) -> int:
        """Ids in memory."""
        return len(self._ids) + len(self._head)

    def append(self, token: int) -> None:
        """One more id. May drop old ones: call it only when every id before is computed."""
        if len(self._head) < self._keep_head and len(self._head) == self._base + len(self._ids):
            self._head.append(token)
        self._ids.append(token)
        if self._keep_tail and len(self._ids) > self._keep_tail + min(self._keep_tail, _SLACK):
            drop = len(self._ids) - self._keep_tail
            del self._ids[:drop]
            self._base += drop

    def get(self, start: int, stop: int) -> array[int]:
        """The ids at places start .. stop - 1. Raises LookupError for ids that were dropped."""
        if start >= self._base:
            return self._ids[start - self._base : stop - self._base]
        if stop <= len(self._head):
            return self._head[start:stop]
        if self._base <= len(self._head):  # few were dropped, and the head has them
            return self._head[start : self._base] + self._ids[: stop - self._base]
        raise LookupError(f"ids {start} to {stop} of a stream were dropped; it holds {self._base} onward")

    def copy(self) -> TokenLog:
        """An independent copy."""
        return TokenLog(self._ids, self._keep_head, self._keep_tail, self._base, self._head)


@dataclass(eq=False, slots=True)
class Group:
    """One request: what was asked, and when things happened to it (monotonic seconds, 0.0 until they did).

    `cancelled` are choices that had their last word while others still wait to fork from them.
    """

    submit: Submit
    arrived: float
    sequences: list[Sequence] = field(default_factory=list)
    cancelled: set[int] = field(default_factory=set)
    num_open: int = 0
    started: float = 0.0
    gained: bool = False
    cached_tokens: int = 0

    @property
    def key(self) -> float:
        """Place in the queue: ten seconds of waiting make up for one level of `priority` (lower goes first)."""
        return self.arrived + 10.0 * self.submit.priority


def no_blocks() -> array[int]:
    """An empty block table."""
    return array("i")


@dataclass(eq=False, slots=True)
class Sequence:
    """One choice. `blocks` is the compact block table (see decoder/inputs.py); `computed` counts positions.

    `forks` are the choices that begin where this one's prompt ends. `replay_to`: once the sink blocks are whole, go on
    at this position; keys before `exact_from` are then not those of the whole stream, and are never shared.
    """

    group: Group
    choice: int
    log: TokenLog
    state: Any
    sinks: int = 0
    prompt_length: int = 0
    num_output: int = 0
    computed: int = 0
    blocks: array[int] = field(default_factory=no_blocks)
    sink_blocks: int = 0
    recent_base: int = 0
    segment_start: int = 0
    replay_to: int = 0
    exact_from: int = 0
    chain: Chain | None = None
    num_hit: int = 0
    scored: int = 0
    evicted: int = 0
    reported_first: bool = False
    preempted: bool = False
    finished: bool = False
    forks: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        """Positions of the current segment, computed or not."""
        return len(self.log) - self.segment_start + self.sinks

    @property
    def remaining(self) -> int:
        """Positions still to be computed; 1 is a decode row."""
        return len(self.log) - self.segment_start + self.sinks - self.computed

    @property
    def next_logical(self) -> int:
        """The logical number of the next block to be allocated."""
        held = len(self.blocks)
        return held if held < self.sink_blocks else self.recent_base + held - self.sink_blocks

    def entry(self, logical: int) -> int:
        """Where in the block table a logical block stands."""
        return logical if logical < self.sink_blocks else logical - self.recent_base + self.sink_blocks

    def place(self, position: int) -> int:
        """Where in the stream the token at `position` stands."""
        return position if position < self.sinks else position - self.sinks + self.segment_start

    def position(self, place: int) -> int:
        """The position at which the current segment computes the token at `place` of the stream."""
        return place if place < self.sinks else place + self.sinks - self.segment_start

    def ids(self, start: int, count: int) -> array[int]:
        """The ids at positions start .. start + count - 1."""
        stop = start + count
        if self.segment_start == self.sinks:
            return self.log.get(start, stop)
        inside = self.log.get(start, min(stop, self.sinks)) if start < self.sinks else no_blocks()
        first = max(start, self.sinks)
        return inside + self.log.get(self.place(first), self.place(first) + stop - first) if stop > first else inside

    @property
    def wants_scores(self) -> bool:
        """Whether prompt log-probabilities are still owed."""
        return self.scored < self.prompt_length - 1 and self.group.submit.params.prompt_logprobs is not None
