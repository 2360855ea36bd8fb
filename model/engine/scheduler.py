"""Scheduler: who computes what in the next step, and what follows from what was computed.

Pure Python over ids and block numbers. One ragged plan a step: decode rows first, then chunks of prompts that
have begun, then new ones, all under one token budget. When blocks run out somebody is preempted and computed
again later: streams that have lost no key yet first, since theirs is the exact and cheap replay.
"""

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from model.engine.block_pool import OutOfBlocks
from model.engine.plan import Plan, PlanRow
from model.engine.residence import Residence
from model.engine.retention import max_blocks
from model.engine.sequence import Group, Sequence
from model.engine.stats import Counters

SCORING_CHUNK = 64  # positions a step whose logits are all wanted: bounds the logits in memory
_DEADLINES = 64  # watched ones before the first look for those that need no watching any more
PATIENCE = 10.0  # seconds a new request waits before streams that might never end make room for it


@dataclass(order=True, slots=True)
class _Waiting:
    """A place in the queue; `tokens` is what the sequence had to compute when it came."""

    key: float
    order: int
    sequence: Sequence = field(compare=False)
    tokens: int = field(compare=False)


class Scheduler:
    """Waiting and running sequences of all requests."""

    def __init__(self, residence: Residence, counters: Counters, token_budget: int, max_sequences: int) -> None:
        """At most `max_sequences` run at once, and never more than the budget has tokens: each gets one a step."""
        self.residence = residence
        self.running: list[Sequence] = []
        self.num_waiting_tokens = 0
        self.max_chunk = token_budget  # tests cut prompts smaller
        self._waiting: list[_Waiting] = []
        self._not_started: set[Group] = set()
        self._deadlines: list[tuple[float, int, Group]] = []
        self._most_deadlines = _DEADLINES
        self._suspects: list[Group] = []
        self._order = itertools.count()
        self._counters = counters
        self._token_budget = token_budget
        self._most_running = min(max_sequences, token_budget)
        self._rows: dict[int, PlanRow] = {}
        self._copies: list[tuple[int, int]] = []

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for blocks or for their turn."""
        return len(self._waiting)

    @property
    def num_waiting_requests(self) -> int:
        """Requests that no step has worked on yet; a preempted or forked sequence is none."""
        return len(self._not_started)

    def waiting(self) -> Iterator[Sequence]:
        """The waiting sequences, in no particular order."""
        return (entry.sequence for entry in self._waiting)

    def open(self, group: Group) -> None:
        """A new request: let its sequences wait, watch its deadline."""
        submit = group.submit
        self._not_started.add(group)
        if submit.alone:
            self._suspects.append(group)
        if submit.queue_timeout is not None:
            self._watch_deadline(group, group.arrived + submit.queue_timeout)
        for sequence in group.sequences:
            self.add(sequence)

    def _watch_deadline(self, group: Group, deadline: float) -> None:
        """Remember it; those that began or ended since are let go of now and then, not only when their time comes."""
        if len(self._deadlines) >= self._most_deadlines:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].started and entry[2].num_open > 0]
            heapq.heapify(self._deadlines)
            self._most_deadlines = 2 * len(self._deadlines) + _DEADLINES
        heapq.heappush(self._deadlines, (deadline, next(self._order), group))

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn."""
        tokens = len(sequence.log)
        self.num_waiting_tokens += tokens
        heapq.heappush(self._waiting, _Waiting(sequence.group.key, next(self._order), sequence, tokens))

    def remove(self, sequence: Sequence) -> None:
        """Take a finished or cancelled sequence out; its blocks are free."""
        sequence.finished = True
        if all(one.finished for one in sequence.group.sequences):
            self._not_started.discard(sequence.group)
        if sequence in self.running:
            self.running.remove(sequence)
            self.residence.leave(sequence)
            return
        for place, entry in enumerate(self._waiting):
            if entry.sequence is sequence:
                self.num_waiting_tokens -= entry.tokens
                self._waiting[place] = self._waiting[-1]
                self._waiting.pop()
                heapq.heapify(self._waiting)
                return

    def plan(self, now: float) -> Plan:
        """The next step. An empty plan means that there is nothing to compute."""
        self._rows = {}
        suspect = self._suspect()
        budget = self._token_budget
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self.running:
            if suspect is None or sequence.group is suspect:
                (decoding if sequence.remaining == 1 else prefilling).append(sequence)
        for sequence in decoding:
            if not sequence.preempted:  # by one before it
                budget -= self._plan_running(sequence, budget)
        for place, sequence in enumerate(prefilling):
            last = place + 1 == len(prefilling) and not self._waiting
            if budget > 0 and not sequence.preempted:
                budget -= self._plan_running(sequence, self._share(budget, last))
        if self._waiting and budget > 0:
            self._admit(budget, suspect, now)
        copies, self._copies = self._copies, []
        return Plan(list(self._rows.values()), copies)

    def _share(self, budget: int, last: bool) -> int:
        """Tokens for one prompt: half of what is left while others want some too, so that none holds up the rest."""
        return budget if last else min(budget, max(self.residence.block_size, budget // 2))

    def _suspect(self) -> Group | None:
        """A request that must run alone until its first token, if there is one."""
        while self._suspects and (self._suspects[0].gained or self._suspects[0].num_open <= 0):
            self._suspects.pop(0)
        return self._suspects[0] if self._suspects else None

    def _plan_running(self, sequence: Sequence, budget: int) -> int:
        """Plan a running sequence, with fewer tokens or preempting others where blocks are short.

        Returns the tokens planned, 0 when it had to give way itself.
        """
        count = self._chunk(sequence, budget)
        while True:
            if self.residence.missing(sequence, count) > self.residence.pool.num_free:
                count = min(count, max(1, self.residence.affordable(sequence)))
            try:
                self.residence.grow(sequence, count)
            except OutOfBlocks:
                victim = self._victim(self.running)
                self.preempt(victim)
                if victim is sequence:
                    return 0
                continue
            return self._row(sequence, count)

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        limit = min(budget, self.max_chunk)
        if limit > SCORING_CHUNK and sequence.wants_scores:
            limit = SCORING_CHUNK
        return self.residence.chunk(sequence, limit)

    def _row(self, sequence: Sequence, count: int) -> int:
        start = sequence.computed
        score = False
        if sequence.wants_scores:
            first, last = sequence.place(start), sequence.place(start + count - 1)
            score = last >= sequence.scored and first < sequence.prompt_length - 1
        self._rows[id(sequence)] = PlanRow(sequence, start, count, start + count == sequence.length, score)
        return count

    @staticmethod
    def _victim(candidates: list[Sequence]) -> Sequence:
        """Last in the queue's order, streams without evictions first."""
        return max(candidates, key=lambda s: (s.evicted == 0, s.group.key, s.choice))

    def preempt(self, sequence: Sequence) -> None:
        """Give up a running sequence's blocks and let it wait in its old place."""
        self._rows.pop(id(sequence), None)
        self.running.remove(sequence)
        self.residence.leave(sequence)
        self._counters.preemptions += 1
        sequence.preempted = True
        self.add(sequence)

    def _admit(self, budget: int, suspect: Group | None, now: float) -> None:
        passed: list[_Waiting] = []
        while budget > 0 and self._waiting and (len(self.running) < self._most_running or suspect is not None):
            entry = heapq.heappop(self._waiting)
            sequence = entry.sequence
            if suspect is not None and sequence.group is not suspect:
                passed.append(entry)
                continue
            share = self._share(budget, not self._waiting)
            count = self._enter(sequence, share)
            givers = [] if count else self._givers(sequence, suspect, now)
            while givers and not count:
                victim = self._victim(givers)
                givers.remove(victim)
                self.preempt(victim)
                count = self._enter(sequence, share)
            if not count:
                passed.append(entry)
                break
            self.num_waiting_tokens -= entry.tokens
            if not sequence.group.started:
                sequence.group.started = now
                self._not_started.discard(sequence.group)
            self.running.append(sequence)
            self.residence.entered(sequence)
            budget -= self._row(sequence, count)
        for entry in passed:
            heapq.heappush(self._waiting, entry)

    def _givers(self, sequence: Sequence, suspect: Group | None, now: float) -> list[Sequence]:
        """Who makes room for a waiting sequence: all others for one that must run alone; for a new request that has
        waited long, the streams that slide and so might hold their blocks for ever."""
        if suspect is not None:
            return [other for other in self.running if other.group is not suspect]
        if sequence.group.started or now - sequence.group.arrived < PATIENCE:
            return []
        return [other for other in self.running if other.evicted]

    def _enter(self, sequence: Sequence, budget: int) -> int:
        """Bring a waiting sequence into the cache; returns its first chunk, 0 when there is no room now."""
        if len(self.running) >= self._most_running:
            return 0
        residence = self.residence
        residence.enter(sequence)
        count = min(self._chunk(sequence, budget), residence.affordable(sequence))
        if self.running:
            # Room for all that is to be computed here and elsewhere, so that nothing half-computed is given up again.
            promised = sum(self._still_wanted(other) for other in self.running)
            if residence.pool.num_free - promised < self._still_wanted(sequence):
                count = 0
        if count <= 0:
            residence.leave(sequence)
            return 0
        residence.grow(sequence, count)
        return count

    def _still_wanted(self, sequence: Sequence) -> int:
        """Blocks that a sequence needs until its next token, at most what its retention lets it hold."""
        if sequence.remaining <= 1 and len(sequence.blocks):
            return 0
        wanted = self.residence.missing(sequence, sequence.remaining)
        retention = sequence.group.submit.retention
        if retention.policy != "none":
            wanted = min(wanted, max_blocks(retention, self.residence.block_size, 1) - len(sequence.blocks))
        return wanted

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` go on from where `parent` is, sharing its blocks; where there is no room it waits instead."""
        if len(self.running) >= self._most_running:
            self.add(child)
            return
        try:
            copy = self.residence.fork(parent, child)
        except OutOfBlocks:
            self.add(child)
            return
        if copy is not None:
            self._copies.append(copy)
        self.running.append(child)

    def expired(self, now: float) -> list[Group]:
        """Requests that have waited longer than they wanted to and have not begun."""
        late = []
        while self._deadlines and self._deadlines[0][0] < now:
            group = heapq.heappop(self._deadlines)[2]
            if not group.started and group.num_open > 0:
                late.append(group)
        return late

    def check(self) -> None:
        """Raise AssertionError unless the pool agrees with what all sequences hold."""
        self.residence.pool.check(sequence.blocks for sequence in self.running)
        if any(group.started or not group.num_open for group in self._not_started):
            raise AssertionError("a request that has begun or ended is counted as waiting")
        if self.num_waiting_tokens != sum(entry.tokens for entry in self._waiting):
            raise AssertionError(f"{self.num_waiting_tokens} waiting tokens are counted, and others wait")
