"""One open request: its attempts on workers become one unbroken stream of deltas.

Knows what was asked for, what was delivered, and how to go on after a worker's death; does not know which
workers there are or how requests are admitted. One consumer; leaving early cancels what still runs.
"""

import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from app.choice import HEARTBEAT, Choice, Delta, OutOfOrder
from app.faults import POISONED, Broken, Refused, broken_by
from app.text.tokenizer import Tokenizer
from app.worker_client import Ended, Event, Inbox, Lost, Pulse, Reader
from model.protocol import (
    Accepted,
    Failed,
    Ready,
    Rejected,
    Retention,
    Row,
    SamplingParams,
    Submit,
    TokenLogprob,
)

log = logging.getLogger("everstream.stream")


@dataclass(frozen=True, slots=True)
class Generation:
    """What a route asks for. `timeout`: seconds for the whole request. `watch`: send KV blocks with the deltas."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    retention: Retention
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    salt: str = ""
    priority: int = 0
    timeout: float | None = None
    watch: bool = False
    skip_special_tokens: bool = True
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class ChoiceUsage:
    """Tokens of one choice: delivered, and evicted from its cache."""

    completion_tokens: int
    tokens_evicted: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request so far; completion tokens count up to the token that completes a stop."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    tokens_evicted: int
    choices: tuple[ChoiceUsage, ...]


class Timings:
    """When things happened to one request: `time.monotonic` seconds, 0.0 until known. `started`: its first step."""

    __slots__ = ("ended", "first_token", "last_token", "opened", "started")

    def __init__(self) -> None:
        self.opened = time.monotonic()
        self.started = 0.0
        self.first_token = 0.0
        self.last_token = 0.0
        self.ended = 0.0


class Observer(Protocol):
    """What the service tells whoever counts."""

    def token_gap(self, seconds: float, now: float) -> None: ...
    def first_token(self, seconds: float, now: float) -> None: ...
    def resumed(self) -> None: ...
    def poisoned(self) -> None: ...
    def finished(self, generation: Generation, usage: Usage, timings: Timings, reason: str) -> None: ...


_REJECTION_STATUS = {"queue_full": 429, "queue_tokens": 429, "draining": 503, "queue_timeout": 503}


class Stream:
    """An async iterator of `Delta`; see `usage` and `prompt_logprobs` at any time."""

    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        ready: Ready,
        inbox: Inbox,
        place: Callable[[Submit, Inbox], None],
        observer: Observer,
        queue_timeout: float | None = None,
        resume: bool = True,
    ) -> None:
        """`place` hands a Submit to some worker, now or as soon as there is one."""
        self.timings = Timings()
        self.prompt_logprobs: list[TokenLogprob] = []
        self.cached_tokens = 0
        self.refused = False
        self.inbox = inbox
        self._generation = generation
        self._place = place
        self._observer = observer
        self._resume = resume
        self._choices = [Choice(n, generation, tokenizer, ready) for n in range(generation.n)]
        self._open = generation.n
        self._pending: deque[Delta] = deque()
        self._listener: Callable[[Delta], bool] | None = None
        self._strikes = 0
        self._gained = False
        self.broken: Broken | None = None
        self._submit = Submit(
            request=generation.request_id,
            attempt=1,
            prompt=generation.prompt_ids,
            params=generation.params,
            retention=generation.retention,
            n=generation.n,
            salt=generation.salt,
            priority=generation.priority,
            queue_timeout=queue_timeout,
            prompt_length=len(generation.prompt_ids),
            watch=generation.watch,
        )

    @property
    def request_id(self) -> str:
        return self._generation.request_id

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._generation.prompt_ids)

    @property
    def waiting(self) -> bool:
        """No step has worked on the request yet."""
        return not self.inbox.started

    @property
    def unfinished(self) -> bool:
        """Some choice has not had its last word."""
        return self._open > 0

    @property
    def reader(self) -> Reader:
        """Who gets what the stream gives."""
        return self.inbox.reader

    @property
    def usage(self) -> Usage:
        choices = tuple(ChoiceUsage(c.num_output_tokens, c.evicted) for c in self._choices)
        return Usage(
            prompt_tokens=len(self._generation.prompt_ids),
            completion_tokens=sum(c.completion_tokens for c in choices),
            cached_tokens=self.cached_tokens,
            tokens_evicted=sum(c.tokens_evicted for c in choices),
            choices=choices,
        )

    def place(self) -> None:
        """Hand the request to a worker; `accepted` tells what became of it."""
        self._place(self._submit, self.inbox)

    async def accepted(self) -> None:
        """Wait until a worker has accepted the request. Raises Refused when none does."""
        accepted = False
        while not accepted:
            for event in await self.inbox.take():
                if isinstance(event, Accepted | Row):  # a row is as good as a word
                    accepted = True
                if accepted:
                    self._take(event)
                elif isinstance(event, Rejected):
                    status = _REJECTION_STATUS.get(event.reason, 400)
                    retry = None if status == 400 else 1
                    raise Refused(status, event.message, event.param, event.reason, retry)
                elif isinstance(event, Ended):
                    raise Refused(event.status, event.message, code=event.code, retry_after=event.retry_after)
                else:
                    self._take(event)
                    if self.broken is not None:
                        broken = self.broken
                        own = broken.status < 500 or broken.code == POISONED  # trying again would not help
                        status, retry = (broken.status, None) if own else (503, 1)
                        raise Refused(status, broken.message, code=broken.code, retry_after=retry) from broken

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        """The next delta. Raises Broken when the stream cannot go on."""
        while not self._pending:
            if self.broken is not None:
                raise self.broken
            if not self._open:
                raise StopAsyncIteration
            for event in await self.inbox.take():
                self._take(event)
        return self._pending.popleft()

    def take_pending(self) -> tuple[Delta, ...]:
        """What is there without waiting: the rest of what one step gave, so that it goes out in one write."""
        if not self._pending:
            return ()
        pending = tuple(self._pending)
        self._pending.clear()
        return pending

    def listen(self, listener: Callable[[Delta], bool]) -> None:
        """From now on a delta that finds the consumer waiting goes to `listener`, in the call that brought its row.

        It returns whether it took the delta; what it raises ends the stream. What it does not take, and last words,
        are the consumer's as before: it sees every delta that the listener did not take, in order.
        """
        self._listener = listener
        self.inbox.listener = self._heard

    def _heard(self, row: Row) -> bool:
        """A row that found the consumer waiting: whether it may sleep on."""
        pending = self._pending
        try:
            self._handle(row)
            if not self._open:
                return False
            if pending and self._listener is not None:
                delta = pending.popleft()
                if not self._listener(delta):
                    pending.appendleft(delta)
                    return False
        except Exception as error:  # whatever it is, it is this stream's: all streams share the call we are in
            self.broken = broken_by(error)
        return self.broken is None

    def fail(self, broken: Broken) -> None:
        """What is still open ends by this fault, wherever it happened; the stream's own fault comes first."""
        if self._open and self.broken is None:
            self.broken = broken

    def close(self) -> None:
        """Cancel what still runs, and count the request; only the first call counts."""
        if self.timings.ended:
            return
        self.timings.started = self.inbox.started
        self.timings.ended = time.monotonic()
        self.inbox.closed = True
        self.inbox.listener = self._listener = None
        client = self.inbox.client
        if client is not None:
            if self._open:
                client.cancel(self.request_id)
            client.forget(self.request_id)
        if not self.refused:
            self._observer.finished(self._generation, self.usage, self.timings, self._reason())

    def _reason(self) -> str:
        if self.broken is not None:
            return "error"
        if self._open:
            return "abort"
        reasons = {choice.finish_reason for choice in self._choices}
        return next(reason for reason in ("abort", "length", "stop") if reason in reasons)

    def _take(self, event: Event) -> None:
        if self.broken is None:
            try:
                self._handle(event)
            except Broken as broken:
                self.broken = broken

    def _handle(self, event: Event) -> None:
        if isinstance(event, Row):
            self._row(event)
        elif isinstance(event, Lost):
            self._lost(event)
        elif isinstance(event, Pulse):
            self._pending.append(HEARTBEAT)
        elif isinstance(event, Ended):
            raise Broken(event.message, event.code, event.status, event.retry_after)
        elif isinstance(event, Failed):
            if event.reason:
                raise Broken(event.message, event.reason, 400)
            raise Broken(event.message)
        elif isinstance(event, Rejected):
            if event.attempt == 1:
                status = _REJECTION_STATUS.get(event.reason, 400)
                raise Broken(event.message, event.reason, status, None if status == 400 else 1)
            text = f"the stream could not be taken up again: {event.message}"
            raise Broken(text, event.reason, _REJECTION_STATUS.get(event.reason, 503), 1)

    def _row(self, row: Row) -> None:
        if row.prompt_logprobs:
            self.prompt_logprobs.extend(row.prompt_logprobs)
        choice = self._choices[row.choice]
        if choice.finished:
            return
        first = not choice.num_output_tokens
        try:
            delta = choice.push(row)
        except OutOfOrder as error:
            raise Broken(f"the worker lost its place: {error}") from error
        if delta.tokens:
            self._time_tokens(choice, row, first)
        if choice.finished:
            self._open -= 1
            if not row.finish and self.inbox.client is not None:
                self.inbox.client.cancel(self.request_id, row.choice)
        if self._pending and delta.choice == self._pending[-1].choice:
            delta = _joined(self._pending.pop(), delta)
        if delta.tokens or delta.text or delta.finish_reason or delta.blocks:
            self._pending.append(delta)

    def _time_tokens(self, choice: Choice, row: Row, first: bool) -> None:
        now = time.monotonic()
        timings = self.timings
        if first:
            self.cached_tokens = max(self.cached_tokens, row.cached_tokens)
        if not timings.first_token:
            timings.first_token = now
            self._observer.first_token(now - timings.opened, now)
        elif not first:
            self._observer.token_gap(now - choice.last_token, now)
        choice.last_token = timings.last_token = now
        self._gained = True
        self._strikes = 0

    def _lost(self, lost: Lost) -> None:
        """Go on elsewhere, unless the request itself seems to kill workers."""
        if not self._open:
            return
        if lost.final:
            raise Broken("the worker died and could not be started again; its log says why", "worker_lost", 503)
        if lost.in_step and not self._gained:
            self._strikes += 1
            if self._strikes > 1:
                self._observer.poisoned()
                told = {"generation": self.request_id, "workers_ended": self._strikes}
                log.error("request poisoned", extra={**told, "prompt_tokens": self.num_prompt_tokens})
                text = "this request ended two workers in a row, the second one alone; it is not tried again"
                raise Broken(text, POISONED)
        if not self._resume:
            raise Broken("the worker died while it served this request; send it again", "worker_lost", 503, 1)
        self._gained = False
        params = self._submit.params
        begun = any(choice.num_output_tokens for choice in self._choices)
        if params.prompt_logprobs is not None and not begun:
            self.prompt_logprobs.clear()
        elif begun:
            params = replace(params, prompt_logprobs=None)
        self._submit = replace(
            self._submit,
            attempt=self._submit.attempt + 1,
            params=params,
            resume=tuple(choice.ledger.resume() for choice in self._choices) if begun else (),
            alone=self._strikes > 0,
            queue_timeout=None,
        )
        self._observer.resumed()
        self._place(self._submit, self.inbox)


def _joined(before: Delta, after: Delta) -> Delta:
    """Two deltas of one choice that the consumer takes in one go."""
    return Delta(
        before.choice,
        before.text + after.text,
        before.tokens + after.tokens,
        after.finish_reason,
        after.stop_reason,
        after.blocks or before.blocks,
        after.evicted,
    )
