"""SamplerState: what one choice's sampling controls remember of its stream, in bounded memory.

Knows ids and counts: the last ids that ranges, DRY and bad words look at, and how often each token occurred. Both
are held as arrays that the compiled sampler reads in place. Rebuilt exactly from prompt, output and counts.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from model.decoder.kernels.sampling import NUMBERS, WHOLE, ControlBlock, address
from model.engine.sampler_filters import MIN_REPETITION, MIN_TEMPERATURE
from model.protocol import MAX_DRY_RANGE, MAX_PENALTY_RANGE, SamplingParams, history_length, penalises

_FIRST = 64  # slots of a fresh table


class History:
    """The last `length` ids of a stream, always in one piece: a buffer of twice that, moved down when full."""

    def __init__(self, length: int, ids: Sequence[int]) -> None:
        self._length = length
        self._buffer = np.zeros(2 * length, dtype=np.int32)
        self._address = address(self._buffer)
        kept = ids[max(0, len(ids) - length) :] if length else ()
        self._buffer[: len(kept)] = kept
        self._end = len(kept)

    def append(self, token: int) -> None:
        """One more id; the oldest falls out."""
        if not self._length:
            return
        if self._end == len(self._buffer):
            self._buffer[: self._length] = self._buffer[self._end - self._length :]
            self._end = self._length
        self._buffer[self._end] = token
        self._end += 1

    @property
    def ids(self) -> NDArray[np.int32]:
        """A view of the last ids, oldest first."""
        return self._buffer[max(0, self._end - self._length) : self._end]

    def where(self) -> tuple[int, int]:
        """Address and number of the last ids."""
        begin = max(0, self._end - self._length)
        return self._address + 4 * begin, self._end - begin


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
        self._block: ControlBlock | None = None
        self._stale = True  # the block does not know of the last appends
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
        self._stale = True
        self._num_output += 1
        if self._penalises:
            if self._range:
                ids = self.history.ids
                if len(ids) >= self._range:
                    was_output = self._num_output > self._range
                    self.occurrences.add(int(ids[len(ids) - self._range]), was_output, -1)
            self.occurrences.add(token, True)
        self.history.append(token)

    def controls(self) -> int:
        """Address of this choice's controls for the compiled sampler, up to date; valid until the next `append`."""
        if self._block is None:
            self._block = control_block(self.params)
        if self._stale:
            occurrences = self.occurrences
            self._block.point_at("seen", occurrences.ids)
            self._block.point_at("anywhere", occurrences.anywhere)
            self._block.point_at("output", occurrences.output)
            self._block.remember(*self.history.where(), occurrences.size)
            self._stale = False
        return self._block.address


def control_block(params: SamplingParams) -> ControlBlock:
    """A request's controls as numbers and arrays."""
    numbers = {name: getattr(params, name) for name in NUMBERS}
    numbers |= {name: getattr(params, name) for name in WHOLE if name not in ("logprobs", "trace")}
    if params.temperature > 0:  # its inverse must be a number that float32 holds
        numbers["temperature"] = max(params.temperature, MIN_TEMPERATURE)
    numbers["repetition_penalty"] = max(params.repetition_penalty, MIN_REPETITION)
    wanted = max(params.logprobs or 0, params.trace)
    numbers["logprobs"] = -1 if params.logprobs is None and not params.trace else wanted
    numbers["trace"] = int(params.trace > 0)
    numbers["dry_range"] = min(params.dry_range or MAX_DRY_RANGE, MAX_DRY_RANGE)
    words = params.bad_words
    return ControlBlock(
        numbers,
        {
            "bias_ids": np.array([token for token, _ in params.logit_bias], dtype=np.int32),
            "bias_values": np.array([value for _, value in params.logit_bias], dtype=np.float64),
            "allowed": np.array(sorted(set(params.allowed_token_ids)), dtype=np.int32),
            "words": np.array([token for word in words for token in word], dtype=np.int32),
            "word_ends": np.cumsum([len(word) for word in words], dtype=np.int64),
            "breakers": np.array(params.dry_breakers, dtype=np.int32),
        },
        params.seed,
    )
