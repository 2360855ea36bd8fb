"""What must be remembered of one choice so that another worker can take it up again, in bounded memory.

Knows output ids and counts only. Without retention every output id is kept; with it, the ids among the
sinks and the last ids a replay needs: 1 + the sum over layers of (min(layer window, window) - 1), since
each layer's kept keys depend on one window of the layer below. Both are kept one KV block longer, because
a worker replays whole blocks. Sampling controls may look further back than a replay: then so does the ledger.
"""

from collections import Counter, deque
from collections.abc import Sequence

from model.protocol import Resume, Retention


def replay_length(retention: Retention, layer_windows: Sequence[int]) -> int:
    """How many of a stream's last ids make its kept keys exact again; 0 means all of them."""
    if retention.policy == "none":
        return 0
    if retention.policy == "restart":
        return retention.sink_tokens + retention.window
    reach = sum((min(own, retention.window) if own else retention.window) - 1 for own in layer_windows)
    return max(1 + reach, retention.sink_tokens + retention.window)


class Ledger:
    """The output of one choice so far: all of it, or under retention what a replay needs and the counts."""

    def __init__(
        self,
        choice: int,
        prompt_length: int,
        retention: Retention,
        layer_windows: Sequence[int],
        block_size: int,
        history: int = 0,
    ) -> None:
        """`history`: how many last ids the sampling controls look at."""
        self.choice = choice
        self.num_output_tokens = 0
        self.finished = False
        self._prompt_length = prompt_length
        length = replay_length(retention, layer_windows)
        self._keep = max(length, history) + block_size if length else 0
        self._head_length = max(0, retention.sink_tokens + block_size - prompt_length) if length else 0
        self._head: list[int] = []
        self._tail: deque[int] = deque(maxlen=self._keep or None)
        self._counts: Counter[int] | None = Counter() if self._keep else None

    def append(self, token: int) -> None:
        """Remember one delivered output id."""
        if len(self._head) < self._head_length:
            self._head.append(token)
        self._tail.append(token)
        self.num_output_tokens += 1
        if self._counts is not None:
            self._counts[token] += 1

    @property
    def held(self) -> int:
        """How many ids are in memory."""
        return len(self._head) + len(self._tail)

    def resume(self) -> Resume:
        """What a worker needs to go on after the last delivered token."""
        dropped = self.num_output_tokens - len(self._tail)
        return Resume(
            choice=self.choice,
            num_output_tokens=self.num_output_tokens,
            tail=tuple(self._tail),
            tail_start=self._prompt_length + dropped,
            counts=tuple(sorted(self._counts.items())) if dropped and self._counts else (),
            finished=self.finished,
            head=tuple(self._head) if dropped else (),
        )
