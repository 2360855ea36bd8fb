"""Counters of one worker's life, plain ints counted where things happen; published as `protocol.Stats`.

Knows numbers and this process's memory; does not know names of metrics or who reads them.
"""

import resource
from dataclasses import dataclass, field
from pathlib import Path

from model.protocol import Stats

_PAGE = resource.getpagesize()
_STATM = Path("/proc/self/statm")
_MEMINFO = Path("/proc/meminfo")
_RESIDENT_EVERY = 64  # steps between two looks at the process's memory


@dataclass
class Counters:
    """Mutable totals; `snapshot` freezes them with the gauges of the moment."""

    steps: int = 0
    prompt_tokens_computed: int = 0
    tokens_sampled: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    tokens_evicted: int = 0
    replayed_tokens: int = 0
    pool_checks: int = 0
    step_seconds: float = 0.0
    last_step_seconds: float = 0.0
    last_prefill_tokens: int = 0
    last_prefill_rows: int = 0
    last_decode_rows: int = 0
    _resident: int = field(default=0, repr=False)

    def snapshot(
        self,
        *,
        running: int,
        waiting: int,
        waiting_tokens: int,
        blocks_total: int,
        blocks_used: int,
        blocks_cached: int,
    ) -> Stats:
        """The counters now, with gauges."""
        if self.steps % _RESIDENT_EVERY == 0 or not self._resident:
            self._resident = resident_bytes()
        return Stats(
            running=running,
            waiting=waiting,
            waiting_tokens=waiting_tokens,
            blocks_total=blocks_total,
            blocks_used=blocks_used,
            blocks_cached=blocks_cached,
            steps=self.steps,
            prompt_tokens_computed=self.prompt_tokens_computed,
            tokens_sampled=self.tokens_sampled,
            prefix_queries=self.prefix_queries,
            prefix_hits=self.prefix_hits,
            preemptions=self.preemptions,
            tokens_evicted=self.tokens_evicted,
            replayed_tokens=self.replayed_tokens,
            pool_checks=self.pool_checks,
            step_seconds=self.step_seconds,
            last_step_seconds=self.last_step_seconds,
            last_prefill_tokens=self.last_prefill_tokens,
            last_prefill_rows=self.last_prefill_rows,
            last_decode_rows=self.last_decode_rows,
            resident_bytes=self._resident,
        )


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not tell."""
    try:
        return int(_STATM.read_text().split()[1]) * _PAGE
    except OSError:
        return 0


def available_bytes() -> int:
    """Memory the machine can still give without swapping; 0 where the system does not tell."""
    try:
        words = next(line for line in _MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:")).split()
        return int(words[1]) * 1024
    except (OSError, StopIteration):
        return 0
