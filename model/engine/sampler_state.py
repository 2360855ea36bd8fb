"""SamplerState: what one choice's sampling controls remember of its stream, in bounded memory.

Knows ids and counts: the last ids that ranges, DRY and bad words look at, and how often each token occurred. Both
are held as arrays that the compiled sampler reads in place. Rebuilt exactly from prompt, output and counts.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from model.protocol import MAX_PENALTY_RANGE, SamplingParams, history_length, penalises

_FIRST = 64  # slots of a fresh table


class History:
    """The last `length` ids of a stream, always in one piece: a buffer of twice that, moved down when full."""

    def __init__(self, length: int, ids: Sequence[int]) -> None:
        self._length = length
        self._buffer = np.zeros(2 * length, dtype=np.int32)
        kept = ids[max(0, len(ids) - length) :] if length else ()
        self._buffer[: len(kept)] = kept
        self._end = len(kept)

    def append(self, token: int) -> None:
        """One more id; the oldest falls out."""
        if self._end == len(self._buffer):
            self._buffer[: self._length] = self._buffer[self._end - self._length :]
            self._end = self._length
        self._buffer[self._end] = token
        self._end += 1

    @property
    def ids(self) -> NDArray[np.int32]:
        """A view of the last ids, oldest first."""
        return self._buffer[max(0, self._end - self._length) : self._end]


class Occurrences:
    """How often each token occurred in prompt and output together, and in the output alone.

    `ids[:size]` are the tokens ever seen, each once, so the table never outgrows the vocabulary.
    """

    def __init__(self) -> None:
        self.size = 0
        self.ids = np.zeros(_FIRST, dtype=np.int32)
        self.anywhere = np.zeros(_FIRST, dtype=np.int32)
        self.output = np.zeros(_FIRST, dtype=np.int32)
        self._slots: dict[int, int] = {}

    def add(self, token: int, output: bool, count: int = 1) -> None:
        """Count `token` once more, or once less with `count` -1."""
        slot = self._slots.get(token)
        if slot is None:
            slot = self._new_slot(token)
        self.anywhere[slot] += count
        if output:
            self.output[slot] += count

    def _new_slot(self, token: int) -> int:
        if self.size == len(self.ids):
            self.ids = np.concatenate([self.ids, np.zeros_like(self.ids)])
            self.anywhere = np.concatenate([self.anywhere, np.zeros_like(self.anywhere)])
            self.output = np.concatenate([self.output, np.zeros_like(self.output)])
        slot = self._slots[token] = self.size
        self.ids[slot] = token
        self.size += 1
        return slot

    def seen(self) -> NDArray[np.int32]:
        """Tokens that occur anywhere."""
        return self.ids[: self.size][self.anywhere[: self.size] > 0]

    def in_output(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Tokens that occur in the output, and how often."""
        there = self.output[: self.size] > 0
        return self.ids[: self.size][there], self.output[: self.size][there]


class SamplerState:
    """One choice's memory. `history` and `occurrences` stay empty where no control asks for them."""

    def __init__(self, params: SamplingParams, history: History) -> None:
        self.params = params
        self.history = history
        self.occurrences = Occurrences()
        self.version = 0  # grows with every append: what was read before is stale
        self._penalises = penalises(params)
        self._range = min(params.penalty_range, MAX_PENALTY_RANGE)
        self._remembers = self._penalises or history_length(params) > 0
        self._num_output = 0

    @classmethod
    def start(
        cls,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        counts: Iterable[tuple[int, int]] = (),
    ) -> "SamplerState":
        """The state after this prompt and output.

        `counts`, where old output ids are gone, are how often each output token occurred; `output_ids` are then the
        last of them, at least `protocol.history_length` many or all since the prompt.
        """
        counted = dict(counts)
        gap = bool(counted) and sum(counted.values()) > len(output_ids)
        stream = tuple(output_ids) if gap else (*prompt_ids, *output_ids)
        state = cls(params, History(history_length(params), stream))
        state._num_output = sum(counted.values()) if gap else len(output_ids)
        if state._penalises and state._range:
            recent = stream[max(0, len(stream) - state._range) :]
            first_output = len(recent) - state._num_output
            for place, token in enumerate(recent):
                state.occurrences.add(token, place >= first_output)
        elif state._penalises:
            if params.repetition_penalty != 1.0:
                for token in prompt_ids:
                    state.occurrences.add(token, False)
            for token, count in (counted if gap else Counter(output_ids)).items():
                state.occurrences.add(token, True, count)
        return state

    def append(self, token: int) -> None:
        """Take in the token that was sampled."""
        if not self._remembers:
            return
        self.version += 1
        self._num_output += 1
        if self._penalises:
            if self._range:
                ids = self.history.ids
                if len(ids) >= self._range:
                    was_output = self._num_output > self._range
                    self.occurrences.add(int(ids[len(ids) - self._range]), was_output, -1)
            self.occurrences.add(token, True)
        self.history.append(token)
