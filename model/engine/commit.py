"""Commit: what follows from a computed row: tokens appended, choices forked, ends recognised, rows to report.

Knows sequences and results; no tensors, no sockets. At the same token, stop beats length.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from model.engine.admission import Limits
from model.engine.plan import PlanRow
from model.engine.residence import Residence
from model.engine.runner import RowResult
from model.engine.sampler import Sampled
from model.engine.scheduler import Scheduler
from model.engine.sequence import Sequence
from model.engine.start import forked
from model.protocol import BlockView, FinishReason, Row, TokenLogprob


@dataclass(slots=True)
class Outcome:
    """What one plan row gave a request: rows to report, or the sentence of a fault that ends it."""

    rows: list[Row] = field(default_factory=list)
    error: str = ""


class Commit:
    """Settles computed rows with the scheduler and the cache. `eos` end a choice unless it ignores them."""

    def __init__(self, scheduler: Scheduler, residence: Residence, limits: Limits, eos: Seq[int]) -> None:
        self._scheduler = scheduler
        self._residence = residence
        self._limits = limits
        self._eos = frozenset(eos)

    def banned(self, sequence: Sequence) -> tuple[int, ...]:
        """Ids that must not be sampled yet."""
        params = sequence.group.submit.params
        return (*self._eos, *params.stop_token_ids) if sequence.num_output < params.min_tokens else ()

    def settle(self, row: PlanRow, result: RowResult) -> Outcome:
        """Bring a sequence up to date with what was computed for it."""
        sequence, outcome = row.sequence, Outcome()
        self._residence.advance(sequence, row.count)
        sequence.scored += len(result.scores)
        if result.error:
            outcome.error = result.error
        elif not row.sample:
            if result.scores or sequence.group.submit.watch:
                outcome.rows.append(self._row(sequence, scores=result.scores))
        elif not result.tokens:  # max_tokens 0: the prompt was all that was asked for
            if sequence.choice not in sequence.group.cancelled:
                outcome.rows.append(self._row(sequence, finish="length", scores=result.scores))
            outcome.rows += [Row(*self._name(sequence), choice, finish="length") for choice in sequence.forks]
            sequence.forks = ()
            self._scheduler.remove(sequence)
        else:
            self._grow(sequence, result, outcome)
        return outcome

    def _grow(self, sequence: Sequence, result: RowResult, outcome: Outcome) -> None:
        """One token for the sequence, and one for each choice that begins here."""
        group = sequence.group
        group.gained = True
        if sequence.forks:
            # Children first: they share the blocks that the parent has before its own token.
            forks, sequence.forks = sequence.forks, ()
            for choice, sampled in zip(forks, result.tokens[1:], strict=True):
                child = forked(sequence, choice, self._limits)
                finish, stop = self._finish(child, sampled.token)
                if finish:
                    child.finished = True
                else:
                    self._scheduler.fork(sequence, child)
                self._append(child, sampled, outcome, finish, stop)
        if sequence.choice in group.cancelled:
            self._scheduler.remove(sequence)  # it had its last word, and only computed the prompt for the others
            return
        sampled = result.tokens[0]
        finish, stop = self._finish(sequence, sampled.token)
        self._append(sequence, sampled, outcome, finish, stop, result.scores)
        if finish:
            self._scheduler.remove(sequence)

    def _append(
        self,
        sequence: Sequence,
        sampled: Sampled,
        outcome: Outcome,
        finish: FinishReason,
        stop: int | None,
        scores: tuple[TokenLogprob, ...] = (),
    ) -> None:
        sequence.log.append(sampled.token)
        sequence.state.append(sampled.token)
        sequence.num_output += 1
        outcome.rows.append(self._row(sequence, finish, sampled, stop, scores))

    def _finish(self, sequence: Sequence, token: int) -> tuple[FinishReason, int | None]:
        """How the choice ends with this token, if it does, and the token that stopped it."""
        submit, index = sequence.group.submit, sequence.num_output
        params = submit.params
        if index >= params.min_tokens and (
            token in params.stop_token_ids or (token in self._eos and not params.ignore_eos)
        ):
            return "stop", token
        if params.max_tokens is not None and index + 1 >= params.max_tokens:
            return "length", None
        if submit.retention.policy == "none":
            return ("length", None) if len(sequence.log) + 1 >= self._limits.longest else ("", None)
        return ("length", None) if index + 1 >= self._limits.max_stream_tokens else ("", None)

    @staticmethod
    def _name(sequence: Sequence) -> tuple[str, int]:
        submit = sequence.group.submit
        return submit.request, submit.attempt

    def _row(
        self,
        sequence: Sequence,
        finish: FinishReason = "",
        sampled: Sampled | None = None,
        stop: int | None = None,
        scores: tuple[TokenLogprob, ...] = (),
    ) -> Row:
        group = sequence.group
        first = not sequence.reported_first and (sampled is not None or bool(finish))
        sequence.reported_first |= first
        return Row(
            request=group.submit.request,
            attempt=group.submit.attempt,
            choice=sequence.choice,
            index=sequence.num_output - (sampled is not None),
            tokens=() if sampled is None else (sampled.token,),
            logprobs=() if sampled is None or sampled.logprob is None else (sampled.logprob,),
            finish=finish,
            stop_token=stop,
            prompt_logprobs=scores,
            cached_tokens=group.cached_tokens if first else 0,
            evicted=sequence.evicted,
            blocks=self._views(sequence) if group.submit.watch else (),
        )

    def _views(self, sequence: Sequence) -> tuple[BlockView, ...]:
        """The sequence's blocks with the positions they hold."""
        size, pool = self._residence.block_size, self._residence.pool
        return tuple(
            BlockView(
                (entry if entry < sequence.sink_blocks else sequence.recent_base + entry - sequence.sink_blocks) * size,
                block,
                pool.references(block),
            )
            for entry, block in enumerate(sequence.blocks)
        )
