"""Engine: requests in, messages out, one step at a time: plan, run, commit.

The whole heart. Knows requests, the scheduler and the runner; no sockets, no files. Every request it accepts
gets exactly one last word for each of its choices.
"""

import os
import signal
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from model.engine.admission import Limits, refusal
from model.engine.commit import Commit, Outcome
from model.engine.plan import Plan
from model.engine.residence import Residence
from model.engine.runner import Runner
from model.engine.sampler_reference import ALL_CUT_ERROR
from model.engine.scheduler import Scheduler
from model.engine.sequence import Group
from model.engine.start import sequences_of
from model.engine.stats import Counters
from model.protocol import Accepted, Begin, Cancel, Failed, Rejected, Row, Stats, Step, Submit, Up


class Engine:
    """One decoder's requests. `eos_token_ids` end a choice unless it ignores them.

    `fault_token` is a test hook: a prompt that holds this id kills the process in its step, as a bad kernel would.
    """

    def __init__(
        self,
        runner: Runner,
        residence: Residence,
        scheduler: Scheduler,
        counters: Counters,
        limits: Limits,
        eos_token_ids: Seq[int],
        fault_token: int = -1,
    ) -> None:
        self.scheduler = scheduler
        self.counters = counters
        self.limits = limits
        self.draining = False
        self.in_flight_since = 0.0
        self._runner = runner
        self._residence = residence
        self._commit = Commit(scheduler, residence, limits, eos_token_ids)
        self._fault_token = fault_token
        self._groups: dict[str, Group] = {}
        self._rows: list[Row] = []
        self._words: list[Up] = []
        self._last_set: tuple[str, ...] = ()

    @property
    def has_work(self) -> bool:
        """Whether a step would do or say something."""
        return bool(self._groups or self._rows or self._words)

    def submit(self, submit: Submit) -> Accepted | Rejected:
        """Queue a request, or say why not."""
        old = self._groups.get(submit.request)
        if old is not None:
            if old.submit.attempt >= submit.attempt:
                return Rejected(submit.request, submit.attempt, "duplicate", "a request of this id runs already")
            self._drop(old)
        if self.draining:
            return Rejected(submit.request, submit.attempt, "draining", "the worker is shutting down")
        waiting_tokens = self.scheduler.num_waiting_tokens if self.scheduler.num_waiting else 0
        refused = refusal(submit, self.limits, self.scheduler.num_waiting_requests, waiting_tokens)
        if refused is not None:
            return refused
        group = Group(submit, time.monotonic())
        group.num_open = submit.n - sum(resume.finished for resume in submit.resume)
        if group.num_open:
            sequences_of(group, self._residence, self.limits)
            self.scheduler.open(group)
            self._groups[submit.request] = group
        return Accepted(submit.request, submit.attempt)

    def cancel(self, cancel: Cancel) -> None:
        """End one choice or all of a request; unknown ones are ignored."""
        group = self._groups.get(cancel.request)
        if group is None:
            return
        for sequence in [s for s in group.sequences if not s.finished]:
            chosen = (sequence.choice, *sequence.forks) if cancel.choice == -1 else (cancel.choice,)
            for choice in chosen:
                if choice in sequence.forks:
                    sequence.forks = tuple(fork for fork in sequence.forks if fork != choice)
                    self._last_word(group, choice, 0)
                elif choice == sequence.choice and choice not in group.cancelled:
                    group.cancelled.add(choice)
                    self._last_word(group, choice, sequence.num_output, sequence.evicted)
            if sequence.choice in group.cancelled and not sequence.forks:
                self.scheduler.remove(sequence)

    def step(self, begin: Callable[[Begin], None] | None = None) -> list[Up]:
        """Compute one step; returns every message it gives rise to. `begin` is told the step's requests before it."""
        started = time.monotonic()
        for group in self.scheduler.expired(started) if self.scheduler.num_waiting else ():
            waited = f"the request waited longer than its {group.submit.queue_timeout} s in the queue"
            self._drop(group)
            self._words.append(Rejected(group.submit.request, group.submit.attempt, "queue_timeout", waited))
        plan = self.scheduler.plan(started)
        if plan.rows:
            self._announce(plan, begin)
            self.in_flight_since = started
            if self._fault_token >= 0:
                self._maybe_die(plan)
            try:
                results = self._runner.run(plan, [self._commit.banned(row.sequence) for row in plan.rows])
            finally:
                self.in_flight_since = 0.0
            for row, result in zip(plan.rows, results, strict=True):
                if not row.sequence.finished:  # its request may have failed a moment ago
                    self._settle(row.sequence.group, self._commit.settle(row, result))
            self._count(plan, time.monotonic() - started)
        elif self._groups and not self._rows and not self._words:
            # Nothing can be planned though requests are open: end them with a word rather than spin.
            self._fail("the engine found no room for this request; start the server with a larger cache")
        words, self._words = self._words, []
        rows, self._rows = self._rows, []
        return [*words, Step(self.counters.steps, tuple(rows), self.stats())]

    def check(self) -> None:
        """Raise AssertionError unless the block pool agrees with what all sequences hold."""
        self.scheduler.check()
        self.counters.pool_checks += 1

    def stats(self) -> Stats:
        """Counters and gauges now."""
        pool, waiting = self._residence.pool, self.scheduler.num_waiting
        return self.counters.snapshot(
            running=len(self.scheduler.running),
            waiting=waiting,
            waiting_tokens=self.scheduler.num_waiting_tokens if waiting else 0,
            blocks_total=pool.num_blocks,
            blocks_used=pool.num_used,
            blocks_cached=pool.num_cached,
        )

    def fail_all(self, message: str) -> list[Up]:
        """Give every open request its last word after a fault of a step; the engine is empty afterwards."""
        self._fail(message)
        words, self._words = self._words, []
        self._rows = []
        return [*words, Step(self.counters.steps, (), self.stats())]

    def _fail(self, message: str) -> None:
        for group in list(self._groups.values()):
            self._drop(group)
            self._words.append(Failed(group.submit.request, group.submit.attempt, message))

    def _maybe_die(self, plan: Plan) -> None:
        if any(self._fault_token in row.sequence.group.submit.prompt for row in plan.rows):
            os.kill(os.getpid(), signal.SIGKILL)

    def _announce(self, plan: Plan, begin: Callable[[Begin], None] | None) -> None:
        requests = tuple(dict.fromkeys(row.sequence.group.submit.request for row in plan.rows))
        if begin is not None and requests != self._last_set:
            begin(Begin(self.counters.steps + 1, requests))
        self._last_set = requests

    def _settle(self, group: Group, outcome: Outcome) -> None:
        if outcome.error:
            self._drop(group)
            reason = "no_token_left" if outcome.error == ALL_CUT_ERROR else ""  # else a fault of ours
            self._words.append(Failed(group.submit.request, group.submit.attempt, outcome.error, reason))
            return
        for row in outcome.rows:
            self.counters.tokens_sampled += len(row.tokens)
            if row.finish:
                self._close(group)
        self._rows += outcome.rows

    def _close(self, group: Group) -> None:
        group.num_open -= 1
        if group.num_open <= 0:
            self._forget(group)

    def _forget(self, group: Group) -> None:
        """Let go of a request and what it remembered at once: the circle of group and sequences would wait for a
        full collection, and those are rare in a process whose loaded model is frozen."""
        group.sequences.clear()
        self._groups.pop(group.submit.request, None)

    def _last_word(self, group: Group, choice: int, index: int, evicted: int = 0) -> None:
        submit = group.submit
        self._rows.append(Row(submit.request, submit.attempt, choice, index, finish="abort", evicted=evicted))
        self._close(group)

    def _drop(self, group: Group) -> None:
        """Forget a request, and what was to be said of it."""
        for sequence in group.sequences:
            if not sequence.finished:
                self.scheduler.remove(sequence)
        group.num_open = 0
        self._forget(group)
        self._rows = [row for row in self._rows if row.request != group.submit.request]

    def _count(self, plan: Plan, seconds: float) -> None:
        counters = self.counters
        decode = tokens = 0
        for row in plan.rows:
            tokens += row.count
            decode += row.count == 1 and row.sample and row.sequence.num_output > 1
        counters.steps += 1
        counters.step_seconds += seconds
        counters.last_step_seconds = seconds
        counters.last_decode_rows = decode
        counters.last_prefill_rows = len(plan.rows) - decode
        counters.last_prefill_tokens = tokens - decode
        counters.prompt_tokens_computed += tokens - decode
