"""A worker process without torch: `python tests/fake_worker.py [options] '<EngineConfig as JSON>'`.

Stands in for `model.worker` wherever only the door matters. `command(...)` builds its command line; `FakePool`
is the same engine inside the test's own process, for tests that need no process.
"""

import argparse
import asyncio
import fcntl
import os
import select
import signal
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
    `marker`, `start_seconds`, `fail`, `fail_again`, `lives`.

    `marker`: a file; `die_at` and `long_step` only count while it does not exist, and the first life makes it.
    `lives`: a file; each life takes its first line, and what stands there is how it starts (see `begin_life`).
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
                inbox = self.inboxes[request]
                inbox.started = inbox.started or time.monotonic()
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


def begin_life(lives: Path) -> str:
    """How this life starts: `fail SENTENCE`, `die`, `stop` (as by a signal, still loading), or "" as any other."""
    with lives.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        line, *rest = file.read().split("\n", 1)
        file.seek(0)
        file.truncate()
        file.write("".join(rest))
    if line in ("die", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if line == "die" else signal.SIGSTOP)
    return line.removeprefix("fail ")


def serve(connection: BlockingConnection, engine: FakeEngine, state: dict[str, float]) -> None:
    """The loop of a worker: take what came, make a step, send it."""
    behaviour = engine.behaviour
    connection.send(engine.ready())
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
    parser.add_argument("--lives", default="")
    parser.add_argument("config")
    arguments = parser.parse_args()
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    if arguments.marker:
        if Path(arguments.marker).exists() and arguments.fail_again:
            arguments.fail = arguments.fail_again
        elif Path(arguments.marker).exists():
            given = {name: value for name, value in given.items() if name not in ("die_at", "long_step")}
        else:
            Path(arguments.marker).touch()
    config = msgspec.json.decode(arguments.config, type=EngineConfig)
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(config.socket)
    connection = BlockingConnection(sock)
    engine, state = FakeEngine(config, Behaviour(**given), resident_bytes=50_000_000), {"since": 0.0}
    threading.Thread(target=beat, args=(connection, engine, state), daemon=True).start()
    time.sleep(arguments.start_seconds)
    refusal = arguments.fail or (begin_life(Path(arguments.lives)) if arguments.lives else "")
    if refusal:
        print(refusal, file=sys.stderr)
        return 3
    try:
        serve(connection, engine, state)
    except ConnectionClosed:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
