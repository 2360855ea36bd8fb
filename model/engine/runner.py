"""Runner: owns the decoder, its cache and the sampler; turns a plan into tokens and log-probabilities.

Knows plans and tensors; changes no sequence. Sizes the cache.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from model.decoder.decoder import Decoder
from model.decoder.kernels import Backend
from model.engine.batch import BatchBuilder
from model.engine.plan import Plan, PlanRow
from model.engine.sampler import Sampled, Sampler, SampleRow
from model.engine.sequence import Sequence
from model.protocol import TokenLogprob


@dataclass(frozen=True)
class RowResult:
    """What a plan row gave: a token for the sequence itself and for each choice that forks from it, and scores."""

    tokens: tuple[Sampled, ...] = ()
    scores: tuple[TokenLogprob, ...] = ()


def fit_blocks(backend: Backend, decoder: Decoder, block_size: int, cache_bytes: int) -> int:
    """How many blocks fit into `cache_bytes`. Raises ValueError when not even a few do."""
    one = backend.new_kv_store(decoder.spec, 1, block_size).num_bytes
    count = cache_bytes // one
    if count < 4:
        raise ValueError(f"a cache of {cache_bytes} bytes holds {count} blocks of {one} bytes: give it more")
    return count


class Runner:
    """One decoder with its cache."""

    def __init__(
        self,
        decoder: Decoder,
        backend: Backend,
        sampler: Sampler,
        num_blocks: int,
        block_size: int,
        max_tokens: int,
        max_rows: int,
    ) -> None:
        self.decoder = decoder
        self.store = backend.new_kv_store(decoder.spec, num_blocks, block_size)
        self._sampler = sampler
        self._builder = BatchBuilder(max_tokens, max_rows, block_size)

    def run(self, plan: Plan, banned: Seq[tuple[int, ...]]) -> list[RowResult]:
        """One result a plan row, in order. `banned`: ids each row's sequence may not take now."""
        for source, target in plan.copies:
            self.store.copy_block(source, target)
        inputs = self._builder.build(plan)
        logits = self.decoder.run(inputs, self.store)  # [wanted rows, vocabulary]
        sampled_rows: list[SampleRow] = []
        places: list[int] = []
        scores: dict[int, tuple[TokenLogprob, ...]] = {}
        at = 0
        for index, row in enumerate(plan.rows):
            width = row.count if row.score else int(row.sample)
            if row.score:
                scores[index] = self._score(row, logits[at : at + width])
            at += width
            if row.sample and row.sequence.group.submit.params.max_tokens != 0:
                for choice in (row.sequence.choice, *row.sequence.forks):
                    sampled_rows.append(sample_row(row.sequence, choice, banned[index]))
                    places.append(at - 1)
        sampled = self._sample(logits, sampled_rows, places)
        results = []
        for index, row in enumerate(plan.rows):
            count = 0
            if row.sample and row.sequence.group.submit.params.max_tokens != 0:
                count = 1 + len(row.sequence.forks)
            results.append(RowResult(tuple(sampled[:count]), scores.get(index, ())))
            sampled = sampled[count:]
        return results

    def _sample(self, logits: Tensor, rows: list[SampleRow], places: list[int]) -> list[Sampled]:
        if not rows:
            return []
        if places != list(range(len(logits))):
            logits = logits.index_select(0, torch.tensor(places, device=logits.device))
        return self._sampler.sample(logits, rows)

    def _score(self, row: PlanRow, logits: Tensor) -> tuple[TokenLogprob, ...]:
        """Log-probabilities of the prompt ids that follow the row's positions and are still owed."""
        sequence = row.sequence
        skip = max(0, sequence.scored - sequence.place(row.start))
        first = sequence.place(row.start + skip) + 1
        last = min(sequence.prompt_length, sequence.place(row.start + row.count - 1) + 2)
        following = sequence.log.get(first, last)
        params = sequence.group.submit.params
        return tuple(
            self._sampler.prompt_logprobs(logits[skip : skip + len(following)], following, params.prompt_logprobs or 0)
        )


def sample_row(sequence: Sequence, choice: int, banned: tuple[int, ...]) -> SampleRow:
    """What the sampler needs to know of a sequence, or of a choice that is about to fork from it."""
    return SampleRow(sequence.group.submit.params, sequence.state, choice, sequence.num_output, banned)
