"""Sampler: logits in, ids out: the one place where tensors become ids.

Knows rows, their controls and their states; no text, no schedule. The order of the controls stands in
`sampler_reference` and docs/sampling.md. A row's token depends on that row alone: not on its neighbours, not on how
many there are, not on the thread that computes it.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from model.engine.sampler_reference import NOT_FINITE, Sampled, SampleRow, sample_one, token_logprob
from model.engine.sampler_state import SamplerState
from model.protocol import TokenLogprob

__all__ = ["NOT_FINITE", "SampleRow", "Sampled", "Sampler", "SamplerState"]


class Sampler:
    """Samples all rows of a step."""

    def __init__(self, vocabulary: int, threads: int = 1) -> None:
        self.vocabulary = vocabulary
        self._threads = threads

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
        """One token a row, from float32 logits [rows, vocabulary]; logits are left as they are.

        A row whose logits are not numbers, or whose controls leave no token, gets an `error` of its own.
        """
        table = logits.detach().cpu().numpy()
        with np.errstate(invalid="ignore", over="ignore"):
            return [sample_one(table[place], row) for place, row in enumerate(rows)]

    def prompt_logprobs(self, logits: Tensor, next_ids: Sequence[int], count: int) -> list[TokenLogprob]:
        """Each next id under the model's distribution at its row, with the `count` best: logits [ids, vocabulary]."""
        table = logits.detach().cpu().numpy()
        return [token_logprob(table[place], token, count) for place, token in enumerate(next_ids)]
