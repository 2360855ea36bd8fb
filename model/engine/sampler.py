"""Sampler: logits in, ids out: the one place where tensors become ids.

Knows rows, their controls and their states; no text, no schedule. The order of the controls stands in
`sampler_reference` and docs/sampling.md. All rows go through one call of the compiled sampler, or one by one through
the reference where there is none. A row's token depends on that row alone: not on its neighbours, not on how many
there are, not on the thread that computes it.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.decoder.kernels.sampling import ALL_CUT, FINE, Outcome, Table, address, open_sampler
from model.engine.sampler_reference import (
    ALL_CUT_ERROR,
    NOT_FINITE_ERROR,
    Sampled,
    SampleRow,
    distribution,
    sample_one,
    token_logprob,
)
from model.engine.sampler_state import SamplerState
from model.protocol import TokenLogprob

__all__ = ["SampleRow", "Sampled", "Sampler", "SamplerState"]


class Sampler:
    """Samples all rows of a step. `compiled` False takes the numpy reference in any case."""

    def __init__(self, vocabulary: int, threads: int = 1, *, compiled: bool = True) -> None:
        self.vocabulary = vocabulary
        self._compiled = open_sampler(vocabulary, threads) if compiled else None
        self._banned: dict[tuple[int, ...], NDArray[np.int32]] = {}

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
        """One token a row, from float32 logits [rows, vocabulary]; logits are left as they are.

        A row whose logits are not numbers, or whose controls leave no token, gets an `error` of its own.
        """
        if self._compiled is None:
            table = logits.detach().cpu().numpy()
            with np.errstate(invalid="ignore", over="ignore"):
                return [sample_one(table[place], row) for place, row in enumerate(rows)]
        outcomes, candidates = self._compiled.sample(plain(logits), self._addresses(rows), widest(rows))
        return [result(place, row, outcomes[place], candidates) for place, row in enumerate(rows)]

    def distributions(self, logits: Tensor, rows: Sequence[SampleRow]) -> NDArray[np.float32]:
        """What `sample` draws from: [rows, vocabulary]. Rows with an error are all 0."""
        chances = np.zeros((len(rows), self.vocabulary), dtype=np.float32)
        if self._compiled is not None:
            self._compiled.sample(plain(logits), self._addresses(rows), widest(rows), chances)
            return chances
        table = logits.detach().cpu().numpy()
        for place, row in enumerate(rows):
            chances[place] = distribution(table[place], row)
        return chances

    def prompt_logprobs(self, logits: Tensor, next_ids: Sequence[int], count: int) -> list[TokenLogprob]:
        """Each next id under the model's distribution at its row, with the `count` best: logits [ids, vocabulary]."""
        if self._compiled is None:
            table = logits.detach().cpu().numpy()
            return [token_logprob(table[place], token, count) for place, token in enumerate(next_ids)]
        width = min(count, self.vocabulary)
        outcomes, candidates = self._compiled.logprobs(plain(logits), next_ids, width)
        return [
            TokenLogprob(one.token, one.logprob, one.rank, candidates.top(place, width))
            for place, one in enumerate(outcomes)
        ]

    def _addresses(self, rows: Sequence[SampleRow]) -> list[tuple[int, int, int, int, int]]:
        found = []
        for row in rows:
            banned = address(self._banned_ids(row.banned)) if row.banned else 0
            found.append((row.state.controls(), banned, len(row.banned), row.choice, row.index))
        return found

    def _banned_ids(self, banned: tuple[int, ...]) -> NDArray[np.int32]:
        array = self._banned.get(banned)
        if array is None:
            if len(self._banned) >= 256:  # requests come and go; their stop ids must not pile up
                self._banned.clear()
            array = self._banned[banned] = np.asarray(banned, dtype=np.int32)
        return array


def plain(logits: Tensor) -> Tensor:
    """The logits as the compiled sampler reads them: float32, in one piece, on the CPU."""
    return logits.detach().to(device="cpu", dtype=torch.float32).contiguous()


def candidates_of(row: SampleRow) -> int:
    """How many candidates a row asks for."""
    return max(row.params.logprobs or 0, row.params.trace)


def widest(rows: Sequence[SampleRow]) -> int:
    """How many candidates the most curious row asks for."""
    return max((candidates_of(row) for row in rows), default=0)


def result(place: int, row: SampleRow, outcome: Outcome, candidates: Table) -> Sampled:
    """One row's outcome in the protocol's terms."""
    if outcome.status != FINE:
        return Sampled(-1, None, ALL_CUT_ERROR if outcome.status == ALL_CUT else NOT_FINITE_ERROR)
    params = row.params
    if params.logprobs is None and not params.trace:
        return Sampled(outcome.token)
    count = candidates_of(row)
    stages = candidates.stages(place, count) if params.trace else ()
    top = candidates.top(place, count)
    return Sampled(
        outcome.token, TokenLogprob(outcome.token, outcome.logprob, outcome.rank, top, stages, outcome.entropy)
    )
