"""One life of one worker, seen from the front end: its messages go to the inboxes of the requests it runs.

Knows ids, attempts and when the worker was last heard; knows no text and no process. When the connection
ends, every request still open gets a `Lost`, which says whether it was in the step in flight.
"""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from model.protocol import (
    Accepted,
    Beat,
    Begin,
    Cancel,
    Drain,
    Failed,
    Ready,
    Rejected,
    Row,
    Stats,
    Step,
    Submit,
    Up,
)
from model.wire import AsyncConnection, ConnectionClosed

NO_STATS = Stats()


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker died. `in_step`: the request was in the step in flight; `final`: no worker will come back."""

    in_step: bool
    final: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """The front end itself ends the stream: a deadline, a drain, a reader that is too slow."""

    code: str
    status: int
    message: str
    retry_after: int | None = None


@dataclass(frozen=True, slots=True)
class Pulse:
    """Nothing happened for a while: time to show the client that the stream lives."""


Event = Accepted | Rejected | Failed | Row | Lost | Ended | Pulse


class Reader:
    """The client of one request, which may have several streams.

    `behind`: it takes nothing at the moment, and who writes to it has to wait. `last_write`: when something was last
    written to it (`time.monotonic`), infinite where it is not told piece by piece.
    """

    __slots__ = ("behind", "last_write")

    def __init__(self) -> None:
        self.behind = False
        self.last_write = math.inf


class Inbox:
    """What arrived for one request and was not taken yet. One consumer; it takes everything at once.

    `limit` bounds the tokens that pile up while the reader is behind; over it the rest is dropped and an
    `Ended("slow_reader")` stands last, so memory is bounded whatever the client does. What the server itself has not
    asked for yet is not the client's fault and does not count. `started`: when a step first worked on the request
    (`time.monotonic`), whichever worker's; 0.0 until then.
    """

    __slots__ = (
        *("_events", "_limit", "_tokens", "_waiter"),
        *("attempt", "client", "closed", "listener", "overflowed", "reader", "started"),
    )

    def __init__(self, limit: int, reader: Reader) -> None:
        self._events: list[Event] = []
        self._limit = limit
        self._tokens = 0
        self._waiter: asyncio.Future[None] | None = None
        self.attempt = 0
        self.client: WorkerClient | None = None
        self.listener: Callable[[Row], bool] | None = None
        self.closed = False
        self.overflowed = False
        self.reader = reader
        self.started = 0.0

    def put(self, event: Event) -> None:
        """Hold one event and wake the consumer; a row that finds it waiting is first offered to the `listener`.

        The listener returns whether the consumer may sleep on; otherwise the consumer wakes to an empty inbox.
        """
        if self.overflowed:
            return
        waiter = self._waiter
        if waiter is not None and waiter.done():
            waiter = None
        if type(event) is Row:
            if waiter is not None and self.listener is not None:
                if not self.listener(event):
                    waiter.set_result(None)
                return
            if self.reader.behind:
                self._tokens += len(event.tokens) + len(event.prompt_logprobs)
                if self._events and self._tokens > self._limit:  # one row alone may be long: a prompt's scores
                    self.overflowed = True
                    text = f"the client let {self._limit} tokens pile up unread; reading stopped"
                    event = Ended("slow_reader", 503, text)
        self._events.append(event)
        if waiter is not None:
            waiter.set_result(None)

    async def take(self) -> list[Event]:
        """Everything that has arrived, waiting for the first; [] where the listener took it and wants to be seen."""
        if not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        events, self._events, self._tokens = self._events, [], 0
        return events


class WorkerClient:
    """One connected worker. `run` pumps its messages until it dies; the rest may be called at any time."""

    def __init__(
        self,
        slot: int,
        connection: AsyncConnection,
        ready: Ready,
        on_step: Callable[[int, Step, Stats], None],
    ) -> None:
        """`on_step(slot, step, stats before)` sees each step once, after its rows were handed out."""
        self.slot = slot
        self.ready = ready
        self.stats = NO_STATS
        self.last_heard = time.monotonic()
        self.step_seconds = 0.0
        self.median_step_seconds = 0.0
        self._connection = connection
        self._on_step = on_step
        self._inboxes: dict[str, Inbox] = {}
        self._in_step: frozenset[str] = frozenset()
        self._lost = False

    @property
    def load(self) -> int:
        """How many requests are open here."""
        return len(self._inboxes)

    @property
    def alive(self) -> bool:
        return not self._lost

    def submit(self, submit: Submit, inbox: Inbox) -> None:
        """Send a request; its events arrive in `inbox` from now on."""
        inbox.attempt = submit.attempt
        inbox.client = self
        self._inboxes[submit.request] = inbox
        try:
            self._connection.send(submit)
        except ConnectionClosed:
            self._lost = True  # at once, not when the pump sees it: or whoever places the request again comes back here
            self._lose(submit.request, inbox)

    def cancel(self, request: str, choice: int = -1) -> None:
        """Stop one choice, or all of them; unknown requests are ignored."""
        if request in self._inboxes and self.alive:
            try:
                self._connection.send(Cancel(request, choice))
            except ConnectionClosed:
                return  # the pump finds out as well and tells everybody

    def forget(self, request: str) -> None:
        """Nobody listens to this request any more: drop what still comes for it."""
        self._inboxes.pop(request, None)

    def drain(self) -> None:
        """Ask the worker to finish what runs and to end."""
        try:
            self._connection.send(Drain())
        except ConnectionClosed:
            return

    def close(self) -> None:
        self._connection.close()

    async def run(self) -> None:
        """Hand out messages until the worker is gone, then tell every open request."""
        receive = self._connection.receive
        try:
            while True:
                self._handle(await receive())
        except ConnectionClosed:
            self._lost = True
        finally:
            self._lost = True
            self._connection.close()
            for request, inbox in list(self._inboxes.items()):
                self._lose(request, inbox)

    def _lose(self, request: str, inbox: Inbox) -> None:
        self._inboxes.pop(request, None)
        inbox.client = None
        inbox.put(Lost(in_step=request in self._in_step))

    def _handle(self, message: Up) -> None:
        self.last_heard = time.monotonic()
        if type(message) is Step:
            for row in message.rows:
                inbox = self._inboxes.get(row.request)
                if inbox is not None and row.attempt == inbox.attempt:
                    if not inbox.started:
                        inbox.started = self.last_heard
                    inbox.put(row)
                    if inbox.overflowed:
                        self.cancel(row.request)
            before, self.stats = self.stats, message.stats
            self._on_step(self.slot, message, before)
        elif type(message) is Beat:
            self.step_seconds = message.step_seconds
            self.median_step_seconds = message.median_step_seconds
        elif type(message) is Begin:
            self._in_step = frozenset(message.requests)
            for request in message.requests:
                inbox = self._inboxes.get(request)
                if inbox is not None and not inbox.started:
                    inbox.started = self.last_heard
        elif isinstance(message, Accepted | Rejected | Failed):
            inbox = self._inboxes.get(message.request)
            if inbox is not None and message.attempt == inbox.attempt:
                inbox.put(message)
