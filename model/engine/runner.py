"""Runner: owns the decoder, its cache and the sampler; turns a plan into tokens and log-probabilities.

Knows plans and tensors; changes no sequence. Sizes the cache.
"""

import logging
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
from model.engine.stats import available_bytes
from model.protocol import TokenLogprob

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RowResult:
    """What a plan row gave: a token for the sequence itself and for each choice that forks from it, and scores.

    `error` is a sentence where the row's logits were no numbers or its controls left no token.
    """

    tokens: Seq[Sampled] = ()
    scores: tuple[TokenLogprob, ...] = ()
    error: str = ""


def fit_blocks(
    backend: Backend, decoder: Decoder, block_size: int, cache_bytes: int, num_blocks: int = 0, device: str = "cpu"
) -> int:
    """How many blocks fit into `cache_bytes`, at most four fifths of the memory the device has free.

    `num_blocks` that is not 0 is an exact wish: it goes before `cache_bytes`, and is refused where it does not fit.
    Raises ValueError with the remedy, also when not even a few blocks fit.
    """
    one = backend.new_kv_store(decoder.spec, 1, block_size).num_bytes
    room = int(0.8 * _free_bytes(device))
    if num_blocks:
        if room and num_blocks * one > room:
            raise ValueError(
                f"--num-blocks {num_blocks} takes {num_blocks * one / (1 << 30):,.1f} GiB for the KV cache, and the "
                f"memory that is free has room for {room // one} blocks: give fewer, or leave --num-blocks out, and "
                "--cache-bytes makes the cache as large as fits"
            )
        return num_blocks
    if room and cache_bytes > room:
        _log.warning("the cache shrinks from %d to %d bytes, since no more memory is free", cache_bytes, room)
        cache_bytes = room
    count = cache_bytes // one
    if count < 4:
        raise ValueError(
            f"a cache of {cache_bytes} bytes holds {count} blocks of {one} bytes: give it more --cache-bytes, "
            "or free memory where it shrank"
        )
    return count


def _free_bytes(device: str) -> int:
    """Memory that the device can still give; 0 where the system does not tell."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_bytes()


def check_device(device: str) -> None:
    """Raise ValueError, with the remedy, for a device that torch cannot compute on."""
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter where torch was built without CUDA
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(f"the device {device!r} cannot be used here ({reason}): use --device cpu") from error


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
        backend.lasting_rows = max_rows
        self.store = backend.new_kv_store(decoder.spec, num_blocks, block_size)
        self._sampler = sampler
        self._builder = BatchBuilder(max_tokens, max_rows, block_size)

    def run(self, plan: Plan, banned: Seq[tuple[int, ...]]) -> list[RowResult]:
        """One result a plan row, in order. `banned`: ids each row's sequence may not take now."""
        for source, target in plan.copies:
            self.store.copy_block(source, target)
        inputs = self._builder.build(plan)
        logits = self.decoder.run(inputs, self.store)  # [wanted rows, vocabulary]
        results = [RowResult() for _ in plan.rows]
        asked: list[SampleRow] = []
        places: list[int] = []
        at = 0
        for index, row in enumerate(plan.rows):
            width = row.count if row.score else int(row.sample)
            if row.score:
                results[index].scores = self._score(row, logits[at : at + width])
            at += width
            if row.sample and row.sequence.group.submit.params.max_tokens != 0:
                asked += sample_rows(row.sequence, banned[index])
                places += [at - 1] * (1 + len(row.sequence.forks))
        if asked:
            if places != list(range(len(logits))):
                logits = logits.index_select(0, torch.tensor(places, device=logits.device))
            self._deal(plan, results, self._sampler.sample(logits, asked))
        return results

    @staticmethod
    def _deal(plan: Plan, results: list[RowResult], sampled: list[Sampled]) -> None:
        """Hand the sampled tokens out to the rows that asked for them."""
        at = 0
        for row, result in zip(plan.rows, results, strict=True):
            if row.sample and row.sequence.group.submit.params.max_tokens != 0:
                count = 1 + len(row.sequence.forks)
                result.tokens = sampled[at : at + count]
                result.error = next((one.error for one in result.tokens if one.error), "")
                at += count

    def _score(self, row: PlanRow, logits: Tensor) -> tuple[TokenLogprob, ...]:
        """Log-probabilities of the prompt ids that follow the row's positions and are still owed."""
        sequence = row.sequence
        # Places jump after the sinks of a later segment, so the first one still owed is looked up as a position.
        skip = max(0, sequence.position(sequence.scored) - row.start)
        first = sequence.place(row.start + skip) + 1
        last = min(sequence.prompt_length, sequence.place(row.start + row.count - 1) + 2)
        following = sequence.log.get(first, last)
        params = sequence.group.submit.params
        return tuple(
            self._sampler.prompt_logprobs(logits[skip : skip + len(following)], following, params.prompt_logprobs or 0)
        )


def sample_rows(sequence: Sequence, banned: tuple[int, ...]) -> list[SampleRow]:
    """What the sampler needs to know of a sequence, and of each choice that is about to fork from it."""
    params, state, index = sequence.group.submit.params, sequence.state, sequence.num_output
    return [SampleRow(params, state, choice, index, banned) for choice in (sequence.choice, *sequence.forks)]
