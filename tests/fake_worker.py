"""A worker process without torch: `python tests/fake_worker.py [options] '<EngineConfig as JSON>'`.

Stands in for `model.worker` wherever only the door matters. `command(...)` builds its command line; `FakePool`
is the same engine inside the test's own process, for tests that need no process.
"""

import argparse
import asyncio
import os
import select
import socket
import sys
import threading
import time
from dataclasses import fields
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from model.config import EngineConfig
from model.protocol import Beat, Cancel, Submit
from model.wire import BlockingConnection, ConnectionClosed
from tests.fake_engine import Behaviour, FakeEngine


def command(**behaviour) -> tuple[str, ...]:
    """The command line of a fake worker; the keywords are those of `Behaviour`, and
    `marker`, `start_seconds`, `fail`, `fail_again`.

    `marker`: a file; `die_at` and `long_step` only count while it does not exist, and the first life makes it.
    """
    options = [f"--{name.replace('_', '-')}={value if isinstance(value, str) else msgspec.json.encode(value).decode()}"
               for name, value in behaviour.items()]  # fmt: skip
    return (sys.executable, str(Path(__file__).resolve()), *options)


class FakeClient:
    """What a stream needs of a worker client, over an engine in the same process."""

    def __init__(self, pool) -> None:
        self.pool = pool

    def cancel(self, request, choice=-1):
        self.pool.cancelled.append((request, choice))
        self.pool.engine.take(Cancel(request, choice))
        self.pool.wake.set()

    def forget(self, request):
        self.pool.inboxes.pop(request, None)


class FakePool:
    """A `Pool` whose one worker is a `FakeEngine` in this process; `run()` makes its steps."""

    def __init__(self, config=None, **behaviour) -> None:
        config = config or EngineConfig(model="fake", name="fake", socket="")
        self.engine = FakeEngine(config, Behaviour(**behaviour))
        self.ready = self.engine.ready()
        self.num_ready = 1
        self.inboxes = {}
        self.cancelled = []
        self.submitted = []
        self.wake = asyncio.Event()
        self.paused = False

    def place(self, submit: Submit, inbox) -> None:
        self.submitted.append(submit)
        inbox.attempt, inbox.client = submit.attempt, FakeClient(self)
        self.inboxes[submit.request] = inbox
        for answer in self.engine.take(submit):
            inbox.put(answer)
        self.wake.set()

    def step(self) -> None:
        begin = self.engine.begin()
        for request in begin.requests if begin else ():
            if request in self.inboxes:
                self.inboxes[request].started = True
        for row in self.engine.step().rows:
            inbox = self.inboxes.get(row.request)
            if inbox is not None and inbox.attempt == row.attempt:
                inbox.put(row)

    async def run(self) -> None:
        while True:
            if self.engine.busy and not self.paused:
                self.step()
                await asyncio.sleep(self.engine.behaviour.delay)
            else:
                self.wake.clear()
                await self.wake.wait()


def beat(connection: BlockingConnection, engine: FakeEngine, state: dict[str, float]) -> None:
    """The thread that says every half second that the process lives."""
    while True:
        time.sleep(0.5)
        age = time.monotonic() - state["since"] if state["since"] else 0.0
        try:
            connection.send(Beat(engine.steps, age, 0.001))
        except ConnectionClosed:
            os._exit(0)


def serve(config: EngineConfig, behaviour: Behaviour) -> None:
    """The loop of a worker: take what came, make a step, send it."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(config.socket)
    connection = BlockingConnection(sock)
    engine = FakeEngine(config, behaviour, resident_bytes=50_000_000)
    connection.send(engine.ready())
    state = {"since": 0.0}
    threading.Thread(target=beat, args=(connection, engine, state), daemon=True).start()
    while not (engine.draining and not engine.busy):
        for message in connection.receive(0 if engine.busy else None):
            for answer in engine.take(message):
                connection.send(answer)
        if not engine.busy:
            continue
        begin = engine.begin()
        if begin is not None:
            connection.send(begin)
        state["since"] = time.monotonic()
        number, seconds = behaviour.long_step
        if number and engine.steps + 1 == number:
            time.sleep(seconds)
        if behaviour.delay:
            select.select([], [], [], behaviour.delay)
        step = engine.step()
        state["since"] = 0.0
        connection.send(step)


def main() -> int:
    parser = argparse.ArgumentParser()
    names = {field.name: field.type for field in fields(Behaviour)}
    for name in names:
        parser.add_argument(f"--{name.replace('_', '-')}", type=msgspec.json.decode if name != "reject" else str)
    parser.add_argument("--marker", default="")
    parser.add_argument("--start-seconds", type=float, default=0.0)
    parser.add_argument("--fail", default="", help="print this sentence and end as a worker that cannot serve")
    parser.add_argument("--fail-again", default="", help="like --fail, from the second life on (with --marker)")
    parser.add_argument("config")
    arguments = parser.parse_args()
    time.sleep(arguments.start_seconds)
    if arguments.fail:
        print(arguments.fail, file=sys.stderr)
        return 3
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    if arguments.marker:
        if Path(arguments.marker).exists() and arguments.fail_again:
            print(arguments.fail_again, file=sys.stderr)
            return 3
        if Path(arguments.marker).exists():
            given = {name: value for name, value in given.items() if name not in ("die_at", "long_step")}
        Path(arguments.marker).touch()
    try:
        serve(msgspec.json.decode(arguments.config, type=EngineConfig), Behaviour(**given))
    except ConnectionClosed:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
