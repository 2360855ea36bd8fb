"""Start: a Submit becomes the sequences it begins with, fresh or taken up again after a worker's death.

Knows ids and what a stream must remember; no blocks, no plans.
"""

from collections.abc import Iterable

from model.engine.admission import Limits
from model.engine.residence import Residence
from model.engine.retention import num_evicted, num_sink_blocks, sinks_of, sliding
from model.engine.sampler import SamplerState
from model.engine.sequence import Group, Sequence, TokenLog
from model.protocol import Resume


def sequences_of(group: Group, residence: Residence, limits: Limits) -> list[Sequence]:
    """The sequences that wait first: one that the other choices fork from, or one for each choice taken up again."""
    submit = group.submit
    if submit.resume:
        return [_resumed(group, resume, residence, limits) for resume in submit.resume if not resume.finished]
    sequence = _sequence(group, 0, submit.prompt, 0, None, residence, limits)
    sequence.state = SamplerState.start(submit.params, submit.prompt, (), ())
    sequence.forks = tuple(range(1, submit.n))
    return [sequence]


def forked(parent: Sequence, choice: int, limits: Limits) -> Sequence:
    """A choice that begins where its parent's prompt ends, before any token was appended."""
    submit = parent.group.submit
    child = Sequence(parent.group, choice, parent.log.copy(), SamplerState.start(submit.params, submit.prompt, (), ()))
    child.sinks = parent.sinks
    child.prompt_length = parent.prompt_length
    child.scored = parent.scored
    child.segment_start = parent.segment_start
    child.evicted = parent.evicted
    parent.group.sequences.append(child)
    return child


def _sequence(
    group: Group,
    choice: int,
    ids: Iterable[int],
    base: int,
    head: Iterable[int] | None,
    residence: Residence,
    limits: Limits,
) -> Sequence:
    retention = group.submit.retention
    keep_head = keep_tail = 0
    if retention.policy == "restart":
        keep_head, keep_tail = retention.sink_tokens, retention.sink_tokens + retention.window
    elif sliding(retention):
        keep_head = num_sink_blocks(retention, limits.block_size) * limits.block_size
        keep_tail = residence.reach(retention) + 3 * limits.block_size  # see Residence: whole blocks
    sequence = Sequence(group, choice, TokenLog(ids, keep_head, keep_tail, base, head), None)
    sequence.prompt_length = len(group.submit.prompt)
    sequence.sinks = sequence.segment_start = sinks_of(retention)
    group.sequences.append(sequence)
    return sequence


def _resumed(group: Group, resume: Resume, residence: Residence, limits: Limits) -> Sequence:
    """A stream up to its last delivered token, with all ids, or with its first and last ones."""
    submit = group.submit
    if resume.tail_start <= len(submit.prompt):
        ids: tuple[int, ...] = submit.prompt[: resume.tail_start] + resume.tail
        base, head = 0, None
    else:
        ids, base, head = resume.tail, resume.tail_start, submit.prompt + resume.head
    sequence = _sequence(group, resume.choice, ids, base, head, residence, limits)
    sequence.state = SamplerState.start(submit.params, submit.prompt, resume.tail, resume.counts)
    sequence.num_output = resume.num_output_tokens
    sequence.evicted = num_evicted(len(sequence.log) - 1, submit.retention)  # counted in a life before
    sequence.reported_first = resume.num_output_tokens > 0
    sequence.preempted = True
    return sequence
