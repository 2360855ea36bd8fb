"""Starts, watches and replaces worker processes, and hands requests to those that are up.

Knows processes, heartbeats and loads; does not know text or HTTP. A worker that is silent for 5 s, or
whose step lasts longer than max(30 s, 20 x its median step), is ended and replaced; requests placed while
nobody is up wait here until somebody is.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from app.process import WORKER, Launched
from app.routing import PrefixRouter
from app.worker_client import Inbox, Lost, WorkerClient
from model.config import EngineConfig
from model.protocol import VERSION, Ready, Stats, Step, Submit
from model.wire import AsyncConnection, ConnectionClosed

log = logging.getLogger("everstream.supervisor")

SILENCE_SECONDS = 5.0
STEP_SECONDS = 30.0
STEP_MEDIANS = 20.0
CHECK_SECONDS = 0.25
LAST_WORDS_SECONDS = 5.0  # for a worker that cannot serve to end by itself: unloading torch takes its time
HANG_UP_SECONDS = 0.5  # for one that served: its streams wait
BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 10.0
HOPELESS_STARTS = 5


class StartFailed(Exception):
    """A worker could not be started at all; the text is one sentence for a person."""


class PoolObserver(Protocol):
    """What the supervisor tells whoever counts."""

    def worker_step(self, slot: int, step: Step, before: Stats) -> None: ...
    def worker_ended(self, slot: int) -> None: ...
    def worker_restarted(self, slot: int) -> None: ...


@dataclass
class Slot:
    """One place for a worker; `client` is None while its process loads or is being replaced."""

    number: int
    config: EngineConfig
    launched: Launched | None = None
    client: WorkerClient | None = None
    fruitless: int = 0
    restarts: int = 0
    stuck: bool = False
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class Supervisor:
    """All workers of one service."""

    def __init__(
        self,
        configs: Sequence[EngineConfig],
        observer: PoolObserver,
        launched: Sequence[Launched] = (),
        command: Sequence[str] = WORKER,
    ) -> None:
        """`launched`: processes that were started before, one for each of the first configurations."""
        self._observer = observer
        self._command = command
        self._slots = [Slot(number, config) for number, config in enumerate(configs)]
        for slot, process in zip(self._slots, launched, strict=False):
            slot.launched = process
        self._router = PrefixRouter()
        self._parked: list[tuple[Submit, Inbox]] = []
        self._stopping = False
        self._watcher: asyncio.Task[None] | None = None
        self._up: asyncio.Future[None] | None = None

    @property
    def ready(self) -> Ready | None:
        """What a worker that is up said of itself; None while there is none."""
        return next((client.ready for client in self._clients()), None)

    @property
    def num_ready(self) -> int:
        """How many workers are up."""
        return len(self._clients())

    @property
    def workers(self) -> list[tuple[int, Ready | None, Stats | None]]:
        """Each worker's number, and what it last said, for a person to look at."""
        return [(s.number, s.client.ready, s.client.stats) if s.client else (s.number, None, None) for s in self._slots]

    @property
    def pids(self) -> list[int]:
        """The process numbers of the workers there are now."""
        return [slot.launched.process.pid for slot in self._slots if slot.launched is not None]

    @property
    def num_restarts(self) -> int:
        return sum(slot.restarts for slot in self._slots)

    async def start(self) -> None:
        """Start every worker and wait until all are up. Raises StartFailed with a sentence."""
        self._up = asyncio.get_running_loop().create_future()
        for slot in self._slots:
            slot.task = asyncio.create_task(self._keep(slot), name=f"worker-{slot.number}")
        self._watcher = asyncio.create_task(self._watch(), name="worker-watch")
        await self._up

    async def stop(self) -> None:
        """End every worker; those that do not go within 2 s are killed."""
        self._stopping = True
        if self._watcher is not None:
            self._watcher.cancel()
        for slot in self._slots:
            if slot.client is not None:
                slot.client.close()
            elif slot.launched is not None:
                slot.launched.kill()
        tasks = [slot.task for slot in self._slots if slot.task is not None]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=2.0)
            for slot in self._slots:
                if slot.launched is not None:
                    slot.launched.kill()
            if late:
                await asyncio.wait(late, timeout=2.0)

    def place(self, submit: Submit, inbox: Inbox) -> None:
        """Hand a request to the worker that suits it best, or keep it until one is up."""
        clients = {client.slot: client for client in self._clients()}
        if not clients:
            self._parked.append((submit, inbox))
            return
        loads = {slot: client.load for slot, client in clients.items()}
        clients[self._router.choose(submit.prompt, submit.salt, loads)].submit(submit, inbox)

    def _clients(self) -> list[WorkerClient]:
        return [s.client for s in self._slots if s.client is not None and s.client.alive and not s.stuck]

    async def _keep(self, slot: Slot) -> None:
        """Keep one slot filled until the service stops."""
        while not self._stopping:
            try:
                if slot.launched is None:
                    slot.launched = Launched(slot.config, self._command)
                await self._live(slot, slot.launched)
            except OSError as error:
                self._failed(slot, f"a worker process cannot be started: {error}")
            except Exception as error:
                log.exception("a fault of the supervisor's own", extra={"worker": slot.number})
                self._failed(slot, f"a worker cannot be supervised: {error}")
            if slot.launched is not None:
                slot.launched.kill()
                slot.launched.close()
                slot.launched = None
            if not self._stopping:
                slot.restarts += 1
                self._observer.worker_restarted(slot.number)
                await asyncio.sleep(min(BACKOFF_SECONDS * 2**slot.fruitless, MAX_BACKOFF_SECONDS))

    async def _live(self, slot: Slot, launched: Launched) -> None:
        """One life: connect, serve, die."""
        exited = asyncio.ensure_future(asyncio.wrap_future(launched.exited))
        greeting = asyncio.create_task(self._greet(slot, launched))
        await asyncio.wait((exited, greeting), return_when=asyncio.FIRST_COMPLETED)
        if not greeting.done():
            greeting.cancel()
        client = None if greeting.cancelled() or not greeting.done() else greeting.result()
        if client is None:
            self._failed(slot, launched.last_words(await _ended(launched, exited, LAST_WORDS_SECONDS)))
            return
        slot.client, slot.stuck = client, False
        log.info("worker ready", extra={"worker": slot.number, "pid": launched.process.pid})
        self._arrived()
        await client.run()
        slot.client = None
        self._observer.worker_ended(slot.number)
        code = await exited if self._stopping else await _ended(launched, exited, HANG_UP_SECONDS)
        slot.fruitless = 0 if client.stats.steps else slot.fruitless + 1
        if not self._stopping:
            log.error("worker lost: %s", launched.last_words(code), extra={"worker": slot.number})

    async def _greet(self, slot: Slot, launched: Launched) -> WorkerClient | None:
        """The client of a worker that called and said Ready; None when it hung up before."""
        loop = asyncio.get_running_loop()
        peer, _ = await loop.sock_accept(launched.listener)
        launched.close()
        connection = AsyncConnection(*await asyncio.open_unix_connection(sock=peer))
        try:
            message = await connection.receive()
        except ConnectionClosed:
            connection.close()
            return None
        except asyncio.CancelledError:
            connection.close()
            raise
        if not isinstance(message, Ready) or message.version != VERSION:
            launched.lines.append(f"it does not speak version {VERSION} of the protocol; install both parts anew")
            connection.close()
            return None
        for line in launched.lines:
            log.info(line, extra={"worker": slot.number})
        launched.on_line = lambda line: log.info(line, extra={"worker": slot.number})
        return WorkerClient(slot.number, connection, message, self._observer.worker_step)

    def _arrived(self) -> None:
        if self._up is not None and not self._up.done() and all(s.client is not None for s in self._slots):
            self._up.set_result(None)
        parked, self._parked = self._parked, []
        for submit, inbox in parked:
            if not inbox.closed:
                self.place(submit, inbox)

    def _failed(self, slot: Slot, sentence: str) -> None:
        """A start that came to nothing: fatal the first time, later a reason to wait longer."""
        slot.fruitless += 1
        if self._stopping:
            return
        if self._up is not None and not self._up.done():
            self._stopping = True
            self._up.set_exception(StartFailed(sentence))
            return
        log.error("worker did not start: %s", sentence, extra={"worker": slot.number})
        if all(s.client is None and s.fruitless >= HOPELESS_STARTS for s in self._slots):
            parked, self._parked = self._parked, []
            for _, inbox in parked:
                inbox.put(Lost(in_step=False, final=True))

    async def _watch(self) -> None:
        """End workers that are silent or stuck in a step; not when the front end itself has slept."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(CHECK_SECONDS)
            if time.monotonic() - before > CHECK_SECONDS + 1.0:
                for client in self._clients():
                    client.last_heard = time.monotonic()
                continue
            for slot in self._slots:
                reason = _stuck(slot.client) if slot.client is not None and not slot.stuck else ""
                if reason and slot.launched is not None:
                    slot.stuck = True
                    log.error("worker replaced: %s", reason, extra={"worker": slot.number})
                    slot.launched.kill()


async def _ended(launched: Launched, exited: "asyncio.Future[int]", patience: float) -> int:
    """The exit code of a worker that hung up: its own where it ends within `patience` s, so that it says why."""
    await asyncio.wait((exited,), timeout=patience)
    launched.kill()  # it may live on without its connection
    return await exited


def _stuck(client: WorkerClient) -> str:
    silence = time.monotonic() - client.last_heard
    if silence > SILENCE_SECONDS:
        return f"it was silent for {silence:.1f} s"
    limit = max(STEP_SECONDS, STEP_MEDIANS * client.median_step_seconds)
    if client.step_seconds > limit:
        return f"its step has lasted {client.step_seconds:.1f} s, the limit is {limit:.1f} s"
    return ""
