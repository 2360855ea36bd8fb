"""Commit: what follows from a computed row: tokens appended, choices forked, ends recognised, rows to report.

Knows sequences and results; no tensors, no sockets. At the same token, stop beats length.
"""

import time
from dataclasses import dataclass, field

from model.engine.admission import Limits
from model.engine.plan import PlanRow
from model.engine.residence import Residence
from model.engine.runner import RowResult
from model.engine.sampler import Sampled
from model.engine.scheduler import Scheduler
from model.engine.sequence import Group, Sequence
from model.engine.start import forked
from model.protocol import BlockView, FinishReason, Row


@dataclass
class Outcome:
    """Rows to report of one request, and how many tokens were sampled for it; `error` fails it with a sentence."""

    group: Group
    rows: list[Row] = field(default_factory=list)
    num_sampled: int = 0
    error: str = ""


def settle(
    row: PlanRow,
    result: RowResult,
    scheduler: Scheduler,
    residence: Residence,
    eos: frozenset[int],
    limits: Limits,
) -> Outcome:
    """Bring a sequence up to date with a computed row."""
    sequence, outcome = row.sequence, Outcome(row.sequence.group)
    residence.advance(sequence, row.count)
    sequence.scored += len(result.scores)
    if not row.sample:
        if result.scores:
            outcome.rows.append(_row(sequence, result, residence))
        return outcome
    outcome.error = next((sampled.error for sampled in result.tokens if sampled.error), "")
    if outcome.error:
        return outcome
    if not result.tokens:  # max_tokens 0: the prompt was all that was asked for
        for choice in (sequence.choice, *sequence.forks):
            outcome.rows.append(_row(sequence, result, residence, finish="length", choice=choice))
        scheduler.remove(sequence)
        return outcome
    cancelled = sequence.group.cancelled
    children = [forked(sequence, choice, residence, limits) for choice in sequence.forks if choice not in cancelled]
    places = {choice: place for place, choice in enumerate((sequence.choice, *sequence.forks))}
    sequence.forks = ()
    for one in (*children, sequence):  # the parent last: children share the blocks it has before its own token
        sampled = result.tokens[places[one.choice]]
        outcome.num_sampled += 1
        _append(
            one,
            sampled,
            result if one is sequence else RowResult(),
            outcome,
            scheduler,
            residence,
            eos,
            limits,
            sequence,
        )
    return outcome


def _append(
    one: Sequence,
    sampled: Sampled,
    result: RowResult,
    outcome: Outcome,
    scheduler: Scheduler,
    residence: Residence,
    eos: frozenset[int],
    limits: Limits,
    parent: Sequence,
) -> None:
    token = sampled.token
    finish, stop = _finish(one, token, eos, limits)
    if one.choice in one.group.cancelled:
        finish, stop = "abort", None
    if one is not parent and not finish:
        scheduler.fork(parent, one)
    one.log.append(token)
    one.state.append(token)
    one.num_output += 1
    one.group.gained = True
    if finish:
        if one is parent:
            scheduler.remove(one)
        one.finished = True
    outcome.rows.append(_row(one, result, residence, finish, sampled=sampled, stop=stop))


def _finish(one: Sequence, token: int, eos: frozenset[int], limits: Limits) -> tuple[FinishReason, int | None]:
    """How the choice ends with this token, if it does, and the token that stopped it."""
    params = one.group.submit.params
    index = one.num_output
    if index >= params.min_tokens and (token in params.stop_token_ids or (token in eos and not params.ignore_eos)):
        return "stop", token
    if params.max_tokens is not None and index + 1 >= params.max_tokens:
        return "length", None
    if one.group.submit.retention.policy == "none":
        return ("length", None) if len(one.log) + 1 >= limits.longest else ("", None)
    return ("length", None) if index + 1 >= limits.max_stream_tokens else ("", None)


def _row(
    sequence: Sequence,
    result: RowResult,
    residence: Residence,
    finish: FinishReason = "",
    choice: int | None = None,
    sampled: Sampled | None = None,
    stop: int | None = None,
) -> Row:
    group, submit = sequence.group, sequence.group.submit
    first = not sequence.reported_first and (sampled is not None or bool(finish))
    if first:
        sequence.reported_first = True
    return Row(
        request=submit.request,
        attempt=submit.attempt,
        choice=sequence.choice if choice is None else choice,
        index=sequence.num_output - (sampled is not None),
        tokens=() if sampled is None else (sampled.token,),
        logprobs=() if sampled is None or sampled.logprob is None else (sampled.logprob,),
        finish=finish,
        stop_token=stop,
        prompt_logprobs=result.scores,
        cached_tokens=group.cached_tokens if first else 0,
        queue_seconds=group.started - group.arrived if first else 0.0,
        prefill_seconds=time.monotonic() - group.started if first else 0.0,
        evicted=sequence.evicted,
        blocks=block_views(sequence, residence) if submit.watch else (),
    )


def block_views(sequence: Sequence, residence: Residence) -> tuple[BlockView, ...]:
    """The sequence's blocks with the positions they hold."""
    size = residence.block_size
    views = []
    for entry, block in enumerate(sequence.blocks):
        logical = entry if entry < sequence.sink_blocks else sequence.recent_base + entry - sequence.sink_blocks
        views.append(BlockView(logical * size, block, residence.pool.references(block)))
    return tuple(views)
