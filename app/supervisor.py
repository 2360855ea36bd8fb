"""Starts, watches and replaces worker processes, and hands requests to those that are up.

Knows processes, lives and loads; does not know text or HTTP. A worker that hangs is ended and replaced; requests
placed while nobody is up wait here until somebody is. A start fails where no worker comes up; once one has served,
every failure is only a reason to try again.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from app.process import WORKER, Launched
from app.routing import PrefixRouter
from app.watching import Loading, hung
from app.worker_client import Inbox, Lost, WorkerClient
from model.config import EngineConfig
from model.protocol import VERSION, Beat, Ready, Stats, Step, Submit
from model.wire import AsyncConnection, ConnectionClosed

log = logging.getLogger("everstream.supervisor")

CHECK_SECONDS = 0.25
LAST_WORDS_SECONDS = 5.0  # for a worker that cannot serve to end by itself: unloading torch takes its time
HANG_UP_SECONDS = 0.5  # for one that served: its streams wait
BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 10.0
MAX_BACKOFF_BESIDE_SECONDS = 60.0  # while others serve: they need the seconds of CPU that a start takes
LIVED_SECONDS = 3.0  # a life of this length was worth its start, also without a token
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
    """One place for a worker; `client` is None while its process loads or is being replaced.

    `hung`: why the life there is now is being ended. `refusal`: why there is no worker here, where one was to be.
    `failures`: starts in a row that came to nothing; `fruitless`: lives in a row that did.
    """

    number: int
    config: EngineConfig
    launched: Launched | None = None
    loading: Loading | None = None
    client: WorkerClient | None = None
    hung: str = ""
    refusal: str = ""
    failures: int = 0
    fruitless: int = 0
    restarts: int = 0
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
        self._halt = asyncio.Event()
        self._served = asyncio.Event()
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
        """Start every worker and wait until each is up or has failed. Raises StartFailed where none comes up."""
        self._up = asyncio.get_running_loop().create_future()
        for slot in self._slots:
            slot.task = asyncio.create_task(self._keep(slot), name=f"worker-{slot.number}")
        self._watcher = asyncio.create_task(self._watch(), name="worker-watch")
        await self._up

    async def stop(self) -> None:
        """End every worker; those that do not go within 2 s are killed."""
        self._halt.set()
        self._served.set()
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
        return [s.client for s in self._slots if s.client is not None and s.client.alive and not s.hung]

    async def _keep(self, slot: Slot) -> None:
        """Keep one slot filled until the service stops."""
        while not self._halt.is_set():
            slot.hung = slot.refusal = ""
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
            if slot.refusal:
                await self._served.wait()  # it is tried again only where the others show that the service can be
            if not self._halt.is_set():
                if slot.refusal:
                    log.error("worker did not start: %s", slot.refusal, extra={"worker": slot.number})
                slot.restarts += 1
                self._observer.worker_restarted(slot.number)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._halt.wait(), _backoff(slot.fruitless, bool(self._clients())))

    async def _live(self, slot: Slot, launched: Launched) -> None:
        """One life: connect, serve, die."""
        exited = asyncio.ensure_future(asyncio.wrap_future(launched.exited))
        slot.loading = Loading(launched.progress)
        greeting = asyncio.create_task(self._greet(slot, launched))
        await asyncio.wait((exited, greeting), return_when=asyncio.FIRST_COMPLETED)
        if not greeting.done():
            greeting.cancel()
        client = None if greeting.cancelled() or not greeting.done() else greeting.result()
        slot.loading = None
        if client is None:
            words = launched.last_words(await _ended(launched, exited, LAST_WORDS_SECONDS))
            self._failed(slot, f"the worker was ended: {slot.hung}" if slot.hung else words)
            return
        slot.client, slot.failures = client, 0
        log.info("worker ready", extra={"worker": slot.number, "pid": launched.process.pid})
        self._arrived()
        began = time.monotonic()
        try:
            await client.run()
        finally:
            slot.client = None
            self._observer.worker_ended(slot.number)
        code = await exited if self._halt.is_set() else await _ended(launched, exited, HANG_UP_SECONDS)
        worth = client.stats.tokens_sampled or time.monotonic() - began >= LIVED_SECONDS
        slot.fruitless = 0 if worth else slot.fruitless + 1
        if not self._halt.is_set():
            log.error("worker lost: %s", launched.last_words(code), extra={"worker": slot.number})

    async def _greet(self, slot: Slot, launched: Launched) -> WorkerClient | None:
        """The client of a worker that called and said Ready; None when it hung up before."""
        loop = asyncio.get_running_loop()
        peer, _ = await loop.sock_accept(launched.listener)
        launched.close()
        connection = AsyncConnection(*await asyncio.open_unix_connection(sock=peer))
        try:
            message = await connection.receive()
            while isinstance(message, Beat):
                if slot.loading is not None:
                    slot.loading.beat()
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
        self._served.set()
        self._decide()
        parked, self._parked = self._parked, []
        for submit, inbox in parked:
            if not inbox.closed:
                self.place(submit, inbox)

    def _failed(self, slot: Slot, sentence: str) -> None:
        """A start that came to nothing: a reason to wait longer; at the first start one to give up.

        Not so one that hung: that may have been the machine, and is tried again a few times.
        """
        slot.loading = None
        slot.fruitless += 1
        slot.failures += 1
        if not slot.hung or slot.failures >= HOPELESS_STARTS:
            slot.refusal = sentence
        self._decide()
        if all(s.client is None and s.failures >= HOPELESS_STARTS for s in self._slots):
            parked, self._parked = self._parked, []
            for _, inbox in parked:
                inbox.put(Lost(in_step=False, final=True))

    def _decide(self) -> None:
        """End the start once every worker is up or has failed; it fails where none is up, nor ever was."""
        undecided = any(slot.client is None and not slot.refusal for slot in self._slots)
        if undecided or self._up is None or self._up.done() or self._halt.is_set():
            return
        if self._clients():
            self._up.set_result(None)
        elif not self._served.is_set():
            self._halt.set()
            self._served.set()
            self._up.set_exception(StartFailed(next(slot.refusal for slot in self._slots)))

    async def _watch(self) -> None:
        """End workers that are silent or stuck in a step; not when the front end itself has slept."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(CHECK_SECONDS)
            if time.monotonic() - before > CHECK_SECONDS + 1.0:
                for slot in self._slots:
                    if slot.loading is not None:
                        slot.loading.beat()
                    elif slot.client is not None:
                        slot.client.last_heard = time.monotonic()
                continue
            for slot in self._slots:
                self._look_at(slot)

    def _look_at(self, slot: Slot) -> None:
        if slot.hung or slot.launched is None:
            return
        if slot.loading is not None:
            slot.hung = slot.loading.hung()
        elif slot.client is not None:
            slot.hung = hung(slot.client)
        if slot.hung:
            log.error("worker replaced: %s", slot.hung, extra={"worker": slot.number})
            slot.launched.kill()


async def _ended(launched: Launched, exited: "asyncio.Future[int]", patience: float) -> int:
    """The exit code of a worker that hung up: its own where it ends within `patience` s, so that it says why."""
    await asyncio.wait((exited,), timeout=patience)
    launched.kill()  # it may live on without its connection
    return await exited


def _backoff(fruitless: int, others: bool) -> float:
    """Seconds before the next start after so many lives that came to nothing; `others`: some worker serves."""
    longest = MAX_BACKOFF_BESIDE_SECONDS if others else MAX_BACKOFF_SECONDS
    return min(BACKOFF_SECONDS * 2.0 ** min(fruitless, 30), longest)
