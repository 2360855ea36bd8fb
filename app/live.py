"""What a person looks at while the service runs: the latest counters, the recent steps and latencies.

Knows plain numbers in bounded rings, fed from the same calls as the metrics; does not know Prometheus, HTTP
or text. A snapshot costs well under a millisecond and may be taken several times a second.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from msgspec.structs import asdict

from model.protocol import Stats, Step

QUANTILES = (0.5, 0.9, 0.99)
RECENT_SECONDS = 30.0
GAPS = 4000  # sorting them takes a third of a millisecond, once a tick


@dataclass
class LiveFeed:
    """Rings of the recent past, and totals since the service began. Seconds and tokens."""

    stats: dict[int, Stats] = field(default_factory=dict)
    restarts: int = 0
    resumed: int = 0
    poisoned: int = 0
    rejected: int = 0
    finished: int = 0
    tokens: int = 0
    step_number: int = 0
    first_tokens: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=1000))
    gaps: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=GAPS))
    steps: deque[tuple[int, float, int, int, int, int, float]] = field(default_factory=lambda: deque(maxlen=600))

    def step(self, slot: int, step: Step) -> None:
        """One engine step of one worker."""
        stats = step.stats
        self.stats[slot] = stats
        self.step_number += 1
        self.steps.append(
            (
                self.step_number,
                time.monotonic(),
                slot,
                stats.last_prefill_tokens,
                stats.last_prefill_rows,
                stats.last_decode_rows,
                stats.last_step_seconds,
            )
        )

    def snapshot(self, since_step: int = 0, up_to_step: int | None = None) -> dict[str, object]:
        """Everything as plain numbers; `steps` are those after number `since_step`, oldest first.

        `up_to_step`: steps after that number are left for later.

        A step is {number, age, worker, prefill_tokens, prefill_rows, decode_rows, seconds}; `age` and all
        latencies are seconds. Quantiles are over the last 30 s and null while there is nothing to tell.
        """
        now = time.monotonic()
        last = self.step_number if up_to_step is None else min(up_to_step, self.step_number)
        gone = self.step_number - len(self.steps)  # numbers up to this one have left the ring
        return {
            "workers": {str(slot): asdict(stats) for slot, stats in sorted(self.stats.items())},
            "restarts": self.restarts,
            "resumed": self.resumed,
            "poisoned": self.poisoned,
            "rejected": self.rejected,
            "finished": self.finished,
            "tokens": self.tokens,
            "last_step": last,
            "first_token_seconds": _quantiles(self.first_tokens, now),
            "inter_token_seconds": _quantiles(self.gaps, now),
            "steps": [
                {
                    "number": number,
                    "age": round(now - when, 3),
                    "worker": slot,
                    "prefill_tokens": prefill_tokens,
                    "prefill_rows": prefill_rows,
                    "decode_rows": decode_rows,
                    "seconds": seconds,
                }
                for number, when, slot, prefill_tokens, prefill_rows, decode_rows, seconds in islice(
                    self.steps, max(0, since_step - gone), max(0, last - gone)
                )
            ],
        }


def _quantiles(ring: deque[tuple[float, float]], now: float) -> dict[str, float | None]:
    """Old values leave the ring for good: they stand at its left end, and nobody asks for them again."""
    while ring and now - ring[0][0] > RECENT_SECONDS:
        ring.popleft()
    values = sorted([value for _, value in ring])
    return {
        f"p{round(q * 100)}": values[min(len(values) - 1, int(q * len(values)))] if values else None for q in QUANTILES
    }
