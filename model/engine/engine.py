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
from model.engine.commit import Outcome, settle
from model.engine.plan import Plan
from model.engine.residence import Residence
from model.engine.runner import Runner
from model.engine.scheduler import Scheduler
from model.engine.sequence import Group, Sequence
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
        self._eos = frozenset(eos_token_ids)
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
        waiting = self.scheduler.num_waiting
        refused = refusal(submit, self.limits, waiting, self.scheduler.num_waiting_tokens if waiting else 0)
        if refused is not None:
            return refused
        group = Group(submit, time.monotonic())
        for sequence in sequences_of(group, self._residence, self.limits):
            self.scheduler.add(sequence)
        group.num_open = submit.n - sum(resume.finished for resume in submit.resume)
        if group.num_open:
            self._groups[submit.request] = group
        return Accepted(submit.request, submit.attempt)

    def cancel(self, cancel: Cancel) -> None:
        """End one choice or all of a request; unknown ones are ignored."""
        group = self._groups.get(cancel.request)
        if group is None:
            return
        unborn = {choice for sequence in group.sequences for choice in sequence.forks}
        for sequence in [s for s in group.sequences if not s.finished]:
            if cancel.choice in (-1, sequence.choice):
                if sequence.forks and cancel.choice != -1:
                    group.cancelled.add(sequence.choice)  # others still fork from it: it ends after its prompt
                else:
                    self._end(sequence, "abort")
        for choice in unborn if cancel.choice == -1 else unborn & {cancel.choice}:
            if choice not in group.cancelled:
                group.cancelled.add(choice)
                self._last_word(group, Row(group.submit.request, group.submit.attempt, choice, finish="abort"))

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
                results = self._runner.run(plan, [self._banned(row.sequence) for row in plan.rows])
                for row, result in zip(plan.rows, results, strict=True):
                    self._settle(settle(row, result, self.scheduler, self._residence, self._eos, self.limits))
            finally:
                self.in_flight_since = 0.0
            self._count(plan, time.monotonic() - started)
        elif self._groups and not self._rows and not self._words:
            self._stuck()
        words, self._words = self._words, []
        rows, self._rows = self._rows, []
        return [*words, Step(self.counters.steps, tuple(rows), self.stats())]

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
        words: list[Up] = []
        for group in list(self._groups.values()):
            self._drop(group)
            words.append(Failed(group.submit.request, group.submit.attempt, message))
        self._rows = []
        return words

    def _maybe_die(self, plan: Plan) -> None:
        if any(self._fault_token in row.sequence.group.submit.prompt for row in plan.rows):
            os.kill(os.getpid(), signal.SIGKILL)

    def _announce(self, plan: Plan, begin: Callable[[Begin], None] | None) -> None:
        requests = tuple(dict.fromkeys(row.sequence.group.submit.request for row in plan.rows))
        if begin is not None and requests != self._last_set:
            begin(Begin(self.counters.steps + 1, requests))
        self._last_set = requests

    def _banned(self, sequence: Sequence) -> tuple[int, ...]:
        params = sequence.group.submit.params
        if sequence.num_output >= params.min_tokens:
            return ()
        return (*self._eos, *params.stop_token_ids)

    def _settle(self, outcome: Outcome) -> None:
        if outcome.error:
            submit = outcome.group.submit
            self._drop(outcome.group)
            self._words.append(Failed(submit.request, submit.attempt, outcome.error))
            return
        for row in outcome.rows:
            if row.finish:
                self._close(outcome.group, row)
            self._rows.append(row)
        self.counters.tokens_sampled += outcome.num_sampled

    def _close(self, group: Group, row: Row) -> None:
        group.num_open -= 1
        if group.num_open <= 0:
            self._groups.pop(row.request, None)

    def _last_word(self, group: Group, row: Row) -> None:
        self._rows.append(row)
        self._close(group, row)

    def _end(self, sequence: Sequence, finish: str) -> None:
        self.scheduler.remove(sequence)
        group = sequence.group
        row = Row(group.submit.request, group.submit.attempt, sequence.choice, sequence.num_output, finish="abort")
        self._last_word(group, row)

    def _drop(self, group: Group) -> None:
        for sequence in group.sequences:
            if not sequence.finished:
                self.scheduler.remove(sequence)
        self._groups.pop(group.submit.request, None)
        self._rows = [row for row in self._rows if row.request != group.submit.request]

    def _stuck(self) -> None:
        """Nothing can be planned though requests are open: end them with a word rather than spin."""
        self._words += self.fail_all("the engine could not find room for this request; the cache is too small for it")

    def _count(self, plan: Plan, seconds: float) -> None:
        counters = self.counters
        decode = sum(row.count == 1 and row.sample and row.sequence.num_output > 1 for row in plan.rows)
        counters.steps += 1
        counters.step_seconds += seconds
        counters.last_step_seconds = seconds
        counters.last_decode_rows = decode
        counters.last_prefill_rows = len(plan.rows) - decode
        counters.last_prefill_tokens = plan.num_tokens - decode
        counters.prompt_tokens_computed += plan.num_tokens - decode
