"""Scheduler: who computes what in the next step, and what follows from what was computed.

Pure Python over ids and block numbers. One ragged plan a step: decode rows first, then chunks of prompts that
have begun, then new ones, all under one token budget. When blocks run out somebody is preempted and computed
again later: streams that have lost no key yet first, since theirs is the exact and cheap replay.
"""

import heapq
import itertools
from collections.abc import Iterator

from model.engine.block_pool import OutOfBlocks
from model.engine.plan import Plan, PlanRow
from model.engine.residence import Residence
from model.engine.sequence import Group, Sequence
from model.engine.stats import Counters

SCORING_CHUNK = 64  # positions a step whose logits are all wanted: bounds the logits in memory


class Scheduler:
    """Waiting and running sequences of all requests."""

    def __init__(self, residence: Residence, counters: Counters, token_budget: int, max_sequences: int) -> None:
        self.residence = residence
        self.running: list[Sequence] = []
        self._waiting: list[tuple[float, int, Sequence]] = []
        self._order = itertools.count()
        self._counters = counters
        self._token_budget = token_budget
        self._max_sequences = max_sequences
        self._rows: dict[int, PlanRow] = {}
        self._copies: list[tuple[int, int]] = []
        self.max_chunk = token_budget  # tests cut prompts smaller

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for blocks or for their turn."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Their prompts' tokens."""
        return sum(sequence.length for _, _, sequence in self._waiting)

    def waiting(self) -> Iterator[Sequence]:
        """The waiting sequences, in no particular order."""
        return (sequence for _, _, sequence in self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn."""
        heapq.heappush(self._waiting, (sequence.group.key, next(self._order), sequence))

    def remove(self, sequence: Sequence) -> None:
        """Take a finished or cancelled sequence out; its blocks are free."""
        sequence.finished = True
        if sequence in self.running:
            self.running.remove(sequence)
            self.residence.leave(sequence)
        else:
            self._waiting = [entry for entry in self._waiting if entry[2] is not sequence]
            heapq.heapify(self._waiting)

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
        for sequence in decoding + prefilling:
            if budget > 0 and sequence in self.running:
                budget -= self._plan_running(sequence, budget)
        self._admit(budget, suspect, now)
        copies, self._copies = self._copies, []
        return Plan(list(self._rows.values()), copies)

    def _suspect(self) -> Group | None:
        """A request that must run alone until its first token, if there is one."""
        groups = itertools.chain((s.group for s in self.running), (s.group for _, _, s in self._waiting))
        return next((group for group in groups if group.submit.alone and not group.gained), None)

    def _plan_running(self, sequence: Sequence, budget: int) -> int:
        """Plan a running sequence, preempting others where blocks are short; returns the tokens planned."""
        count = self._chunk(sequence, budget)
        while True:
            try:
                self.residence.grow(sequence, count)
            except OutOfBlocks:
                victim = self._victim()
                self.preempt(victim)
                if victim is sequence:
                    return 0
                continue
            return self._row(sequence, count)

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        limit = min(budget, self.max_chunk)
        if sequence.wants_scores:
            limit = min(limit, SCORING_CHUNK)
        return self.residence.chunk(sequence, limit)

    def _row(self, sequence: Sequence, count: int) -> int:
        start = sequence.computed
        score = 0
        if sequence.wants_scores:
            first, last = sequence.place(start), sequence.place(start + count - 1)
            score = count if last >= sequence.scored and first < sequence.prompt_length - 1 else 0
        sample = start + count == sequence.length
        self._rows[id(sequence)] = PlanRow(sequence, start, count, sample, score)
        return count

    def _victim(self) -> Sequence:
        """Last in the queue's order, streams without evictions first."""
        return max(self.running, key=lambda s: (s.evicted == 0, s.group.key, s.choice))

    def preempt(self, sequence: Sequence) -> None:
        """Give up a running sequence's blocks and let it wait in its old place."""
        self._rows.pop(id(sequence), None)
        self.running.remove(sequence)
        self.residence.leave(sequence)
        self._counters.preemptions += 1
        sequence.preempted = True
        self.add(sequence)

    def _admit(self, budget: int, suspect: Group | None, now: float) -> None:
        passed: list[tuple[float, int, Sequence]] = []
        while budget > 0 and self._waiting and len(self.running) < self._max_sequences:
            entry = heapq.heappop(self._waiting)
            sequence = entry[2]
            if suspect is not None and sequence.group is not suspect:
                passed.append(entry)
                continue
            count = self._enter(sequence, budget)
            if not count:
                passed.append(entry)
                break
            if not sequence.group.started:
                sequence.group.started = now
            self.running.append(sequence)
            budget -= self._row(sequence, count)
        for entry in passed:
            heapq.heappush(self._waiting, entry)

    def _enter(self, sequence: Sequence, budget: int) -> int:
        """Bring a waiting sequence into the cache; returns its first chunk, 0 when there is no room now."""
        pool = self.residence.pool
        self.residence.enter(sequence)
        count = self._chunk(sequence, budget)
        # Room for the whole prompt, so that a half-computed one need not be given up again; a lone one just begins.
        wanted = self.residence.missing(sequence, min(sequence.remaining, self._most(sequence)))
        if pool.num_free < (wanted if self.running else self.residence.missing(sequence, count)):
            self.residence.leave(sequence)
            return 0
        self.residence.grow(sequence, count)
        if sequence.preempted:
            self._counters.replayed_tokens += sequence.remaining - 1
            sequence.preempted = False
        return count

    def _most(self, sequence: Sequence) -> int:
        """Positions whose blocks a sequence may hold at once."""
        retention = sequence.group.submit.retention
        return sequence.remaining if retention.policy == "none" else retention.window + self._token_budget

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` go on from where `parent` is, sharing its blocks; without a free block it waits instead."""
        try:
            copy = self.residence.fork(parent, child)
        except OutOfBlocks:
            self.add(child)
            return
        if copy is not None:
            self._copies.append(copy)
        if len(self.running) < self._max_sequences:
            self.running.append(child)
        else:
            self._copies = [other for other in self._copies if other is not copy]
            self.residence.leave(child)
            self.add(child)

    def expired(self, now: float) -> list[Group]:
        """Requests that have waited longer than they wanted to and have not begun."""
        late = {
            id(s.group): s.group
            for s in self.waiting()
            if s.group.submit.queue_timeout is not None
            and not s.group.started
            and now - s.group.arrived > s.group.submit.queue_timeout
        }
        return list(late.values())

    def check(self) -> None:
        """Raise AssertionError unless the pool agrees with what all sequences hold."""
        self.residence.pool.check(sequence.blocks for sequence in self.running)
