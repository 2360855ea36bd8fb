"""From prompt ids and parameters to an async stream of text deltas: admission, deadlines, drain.

Knows every open stream of the service and when to refuse a new one; does not know HTTP, nor how workers are
started. Routes use only this module: `async with service.open(Generation(...)) as stream`.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from app.choice import HEARTBEAT, Delta, Token
from app.faults import QUEUE_TIMEOUT, Broken, Refused, broken_by
from app.stream import ChoiceUsage, Generation, Observer, Stream, Timings, Usage
from app.text.tokenizer import Tokenizer
from app.worker_client import Ended, Inbox, Pulse, Reader
from model.protocol import Ready, Submit

log = logging.getLogger("everstream.generation")

__all__ = [
    "HEARTBEAT",
    "Admission",
    "Broken",
    "ChoiceUsage",
    "Delta",
    "Generation",
    "Pool",
    "Refused",
    "Service",
    "ServiceObserver",
    "Stream",
    "Timings",
    "Token",
    "Usage",
    "broken_by",
]


class Pool(Protocol):
    """Some workers: the only thing the service needs of the supervisor."""

    @property
    def ready(self) -> Ready | None:
        """What a worker that is up said of itself; None while there is none."""

    @property
    def num_ready(self) -> int:
        """How many workers are up."""

    def place(self, submit: Submit, inbox: Inbox) -> None:
        """Hand a request to a worker, now or as soon as one is up."""


class ServiceObserver(Observer, Protocol):
    """What the service counts beside its streams."""

    def rejected(self, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Admission:
    """The bounds of the service: requests, tokens, seconds. `stream_buffer`: tokens held for a slow reader."""

    max_waiting: int = 512
    max_waiting_tokens: int = 1 << 20
    queue_timeout: float | None = None
    request_timeout: float | None = None
    silence: float = 15.0
    stream_buffer: int = 4096
    resume: bool = True
    log_prompts: bool = False


class Service:
    """Opens streams, and ends them when their time is up."""

    def __init__(
        self, pool: Pool, tokenizer: Tokenizer, admission: Admission, observer: ServiceObserver, model: str
    ) -> None:
        self.tokenizer = tokenizer
        self.model = model
        self.created = int(time.time())
        self.draining = False
        self._pool = pool
        self._admission = admission
        self._observer = observer
        self._streams: dict[str, Stream] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._seconds_per_request = 0.0
        self._last_finish = 0.0

    @property
    def ready(self) -> Ready:
        """What the worker said of itself. Raises Refused while no worker is up, and while draining."""
        if self.draining:
            raise Refused(503, "the server is shutting down; send the request to another one", code="draining")
        ready = self._pool.ready
        if ready is None:
            raise Refused(503, "the model is loading; try again in a few seconds", code="loading", retry_after=2)
        return ready

    @property
    def status(self) -> str:
        """ "ready", "loading" (no worker is up) or "draining"."""
        return "draining" if self.draining else "ready" if self._pool.ready is not None else "loading"

    @property
    def num_open(self) -> int:
        """Streams that are open now."""
        return len(self._streams)

    @property
    def num_waiting(self) -> int:
        """Streams that no step has worked on yet."""
        return sum(stream.waiting for stream in self._streams.values())

    @asynccontextmanager
    async def open(self, generation: Generation) -> AsyncIterator[Stream]:
        """A stream of one request; see `open_all`."""
        async with self.open_all((generation,)) as streams:
            yield streams[0]

    @asynccontextmanager
    async def open_all(self, generations: Sequence[Generation]) -> AsyncIterator[list[Stream]]:
        """One stream for each prompt of one request, all open or none; leaving the block cancels what still runs.

        All are placed at once, so that they are accepted together. Raises Refused before anything is streamed: 400, 429
        (a full queue) or 503 (loading, draining). Where no worker says anything for `silence` seconds, they are open
        without it: the client must hear that somebody is there. What is raised inside the block ends them as broken.
        """
        streams: list[Stream] = []
        deadlines: list[asyncio.TimerHandle] = []
        try:
            try:
                reader, ready = Reader(), self._admit(generations)
                for generation in generations:
                    streams.append(self._stream(generation, ready, reader))
                    deadlines += self._deadlines(streams[-1], generation)
                for stream in streams:
                    stream.place()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._admission.silence):
                        for stream in streams:
                            await stream.accepted()
            except Refused as refused:
                for stream in streams:
                    stream.refused = True
                self._observer.rejected(refused.code or "invalid")
                raise
            yield streams
        except Refused:
            raise
        except Exception as error:
            broken = broken_by(error)
            if broken is not error:
                broken.__cause__ = None  # it is on its way to whoever logs it
            for stream in streams:
                stream.fail(broken)
            raise
        finally:
            for deadline in deadlines:
                deadline.cancel()
            for stream in streams:
                self._close(stream)
            self._tell_broken(streams)

    def _admit(self, generations: Sequence[Generation]) -> Ready:
        """Raises Refused. The prompts of one request do not stand in each other's way: they come in whole."""
        ready = self.ready
        bounds = self._admission
        for generation in generations:
            if generation.request_id in self._streams:
                raise Refused(400, f"a request with the id {generation.request_id!r} is running already", "request_id")
        waiting = [stream for stream in self._streams.values() if stream.waiting]
        if len(waiting) >= bounds.max_waiting:
            raise self._full(f"{len(waiting)} requests are waiting already", "queue_full", len(waiting))
        tokens = sum(stream.num_prompt_tokens for stream in waiting)
        new = sum(len(generation.prompt_ids) for generation in generations)
        if waiting and tokens + new > bounds.max_waiting_tokens:
            raise self._full(f"{tokens} prompt tokens are waiting already", "queue_tokens", len(waiting))
        return ready

    def _stream(self, generation: Generation, ready: Ready, reader: Reader) -> Stream:
        bounds = self._admission
        stream = Stream(
            generation,
            self.tokenizer,
            ready,
            Inbox(bounds.stream_buffer, reader),
            self._pool.place,
            self._observer,
            queue_timeout=bounds.queue_timeout,
            resume=bounds.resume,
        )
        self._streams[generation.request_id] = stream
        self._idle.clear()
        if bounds.log_prompts:
            text = self.tokenizer.decode(list(generation.prompt_ids), skip_special=False)
            log.info("prompt", extra={"generation": generation.request_id, "prompt": text})
        return stream

    def _full(self, what: str, code: str, waiting: int) -> Refused:
        wait = self._wait(waiting)
        return Refused(429, f"the queue is full: {what}; try again in {wait} s", code=code, retry_after=wait)

    def _wait(self, waiting: int) -> int:
        """Seconds after which so many waiting requests are likely to have been served."""
        return max(1, min(60, math.ceil(waiting * self._seconds_per_request)))

    def _tell_broken(self, streams: Sequence[Stream]) -> None:
        """One line for a request that broke off after it was taken, with its code and sentence."""
        broken = next((stream.broken for stream in streams if stream.broken is not None), None)
        if broken is None or streams[0].refused:
            return
        if broken.code == QUEUE_TIMEOUT:
            self._observer.rejected(QUEUE_TIMEOUT)
        told = {"generation": streams[0].request_id, "error": broken.code, "sentence": broken.message}
        tokens = sum(stream.usage.completion_tokens for stream in streams)
        level = logging.ERROR if broken.status == 500 else logging.WARNING
        log.log(level, "stream broken", extra={**told, "tokens": tokens}, exc_info=broken.__cause__)

    def _deadlines(self, stream: Stream, generation: Generation) -> list[asyncio.TimerHandle]:
        loop = asyncio.get_running_loop()
        handles = []
        limits = [limit for limit in (generation.timeout, self._admission.request_timeout) if limit is not None]
        if limits:
            seconds = min(limits)
            ended = Ended("timeout", 504, f"the request's time limit of {seconds:g} s is over")
            handles.append(loop.call_later(seconds, stream.inbox.put, ended))
        if self._admission.queue_timeout is not None:
            handles.append(loop.call_later(self._admission.queue_timeout, self._end_waiting, stream))
        return handles

    def _end_waiting(self, stream: Stream) -> None:
        if stream.waiting:
            seconds = self._admission.queue_timeout
            message = f"the request waited {seconds:g} s in the queue without being started"
            stream.inbox.put(Ended(QUEUE_TIMEOUT, 503, message, self._wait(self.num_waiting)))

    def _close(self, stream: Stream) -> None:
        stream.close()
        self._streams.pop(stream.request_id, None)
        now = time.monotonic()
        if self._last_finish:
            gap = min(now - self._last_finish, 60.0)
            self._seconds_per_request += (gap - self._seconds_per_request) / 16
        self._last_finish = now
        if not self._streams:
            self._idle.set()

    async def keep_alive(self) -> None:
        """Runs for ever: a heartbeat for each client that was written nothing for `silence` seconds."""
        silence = self._admission.silence
        while True:
            await asyncio.sleep(min(1.0, silence / 4))
            now = time.monotonic()
            told: set[Reader] = set()
            for stream in self._streams.values():
                reader = stream.reader
                silent = now - reader.last_write >= silence and not reader.behind
                if silent and stream.unfinished and reader not in told:
                    told.add(reader)
                    stream.inbox.put(Pulse())  # beside what may lie there: that may show nothing

    async def drain(self, grace: float) -> None:
        """Refuse new work, let running streams finish for `grace` seconds, then end each with one clear error."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), grace)
        except TimeoutError:
            message = f"the server is shutting down and its grace time of {grace:g} s is over"
            for stream in self._streams.values():
                stream.inbox.put(Ended("draining", 503, message))
            try:
                await asyncio.wait_for(self._idle.wait(), 2.0)  # time to write the last event
            except TimeoutError:
                return
