"""What the front end costs an event: `python -m bench.front`.

The real front end in a process of its own, as `serve` runs it, behind it a pretend worker that gives 1,000 tokens a
second in steps of 32 streams, before it a client that only counts. CPU-seconds (user and system) of the front end
alone, less what it takes while nothing is asked, over the events it sent. Needs the tokenizer of a model, no weights.
"""

import argparse
import asyncio
import json
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from socket import AF_UNIX, socket

import msgspec
from rich.console import Console
from rich.table import Table

from app import catalog, process, settings
from app import main as front
from app.text.tokenizer import load_tokenizer
from bench.overhead import cpu_clock, server
from bench.serve import SENTENCE
from model.config import EngineConfig
from model.protocol import VERSION, Accepted, Beat, Begin, Cancel, Ready, Row, Stats, Step, Submit
from model.wire import BlockingConnection, ConnectionClosed

NAME = "front"
PROMPT = "Tell me about the sea."
ENDLESS = 1_000_000
BODIES: dict[str, tuple[str, dict[str, object]]] = {
    "completions": ("/v1/completions", {"prompt": PROMPT}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
}


class Pretence:
    """A worker that computes nothing: a token for each running request at each beat of a clock."""

    def __init__(self, config: EngineConfig, period: float) -> None:
        tokenizer = load_tokenizer(config.model)
        self._words = tokenizer.encode(SENTENCE, add_special=False)
        self._period = period
        self._running: dict[str, tuple[Submit, int]] = {}
        self._steps = self._sampled = 0
        sock = socket(AF_UNIX)
        sock.connect(config.socket)
        self._connection = BlockingConnection(sock)
        self._connection.send(self._ready(config, tokenizer.size))

    def _ready(self, config: EngineConfig, vocabulary: int) -> Ready:
        return Ready(
            version=VERSION,
            pid=0,
            model=config.name,
            family="pretence",
            context=2 * ENDLESS,
            vocabulary=vocabulary,
            num_blocks=ENDLESS,
            block_size=config.block_size,
            max_sequences=config.max_sequences,
            token_budget=config.token_budget,
            dtype="none",
            device="cpu",
            kernels="none",
            policies=("none",),
        )

    def beat(self) -> None:
        """Say every half second that the process lives, as a worker does."""
        while True:
            time.sleep(0.5)
            self._connection.send(Beat(self._steps, 0.0, self._period))

    def run(self) -> None:
        """Steps until the front end hangs up."""
        due = time.monotonic()
        while True:
            left = max(0.0, due - time.monotonic()) if self._running else None
            changed = False
            for message in self._connection.receive(left):
                if isinstance(message, Submit):
                    if not self._running:
                        due = time.monotonic()
                    self._running[message.request] = (message, 0)
                    self._connection.send(Accepted(message.request, message.attempt))
                    changed = True
                elif isinstance(message, Cancel):
                    changed = self._running.pop(message.request, None) is not None or changed
            if changed:
                self._connection.send(Begin(self._steps + 1, tuple(self._running)))
            if self._running and time.monotonic() >= due:
                due = max(due + self._period, time.monotonic())
                self._connection.send(self._step())

    def _step(self) -> Step:
        rows = []
        for name, (submit, index) in list(self._running.items()):
            last = index + 1 == submit.params.max_tokens
            token = self._words[index % len(self._words)]
            rows.append(Row(name, submit.attempt, 0, index, (token,), finish="length" if last else ""))
            if last:
                del self._running[name]
            else:
                self._running[name] = (submit, index + 1)
        self._steps += 1
        self._sampled += len(rows)
        stats = Stats(
            running=len(self._running),
            blocks_total=ENDLESS,
            blocks_used=len(rows),
            steps=self._steps,
            tokens_sampled=self._sampled,
            step_seconds=self._steps * self._period,
            last_step_seconds=self._period,
            last_decode_rows=len(rows),
            resident_bytes=1 << 28,
        )
        return Step(self._steps, tuple(rows), stats)


def pretend(config: EngineConfig, period: float) -> int:
    """The pretend worker's process."""
    try:
        worker = Pretence(config, period)
        threading.Thread(target=worker.beat, daemon=True).start()
        worker.run()
    except ConnectionClosed:
        return 0
    return 0


def serve(model: str, port: int, period: float) -> int:
    """The front end's process: as `serve` of the command line, with another program in the worker's place."""
    chosen = settings.load(model=model, port=port, log_level="info")
    configs = chosen.engine_configs(Path(model), NAME)
    program = (sys.executable, "-m", "bench.front", "--period", str(period), "--worker")
    return front.serve(chosen, configs, process.launch_all(configs, program), command=program)


@dataclass(frozen=True)
class Figure:
    """One round: what was asked, the events that came, and the front end's CPU-seconds, idle cost taken off."""

    kind: str
    max_tokens: int
    events: int
    seconds: float
    cpu_seconds: float

    @property
    def micros(self) -> float:
        """CPU-microseconds an event."""
        return self.cpu_seconds / self.events * 1e6


class Reader:
    """Clients that ask, count `data:` lines and ask again; they look at nothing else."""

    def __init__(self, port: int, kind: str, max_tokens: int) -> None:
        path, body = BODIES[kind]
        told = json.dumps({**body, "max_tokens": max_tokens, "stream": True, "ignore_eos": True, "temperature": 0})
        head = f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: {len(told)}"
        self._request = f"{head}\r\n\r\n{told}".encode()
        self._port = port
        self.events = 0
        self.begun = 0

    async def follow(self) -> None:
        """One client, one connection, until it is cancelled. Raises RuntimeError where the server refuses."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        try:
            while True:
                writer.write(self._request)
                status = await reader.readline()
                if b" 200 " not in status:
                    raise RuntimeError(f"the front end answered {status!r}")
                self.begun += 1
                tail = b""
                while not tail.endswith(b"\r\n0\r\n\r\n"):
                    data = await reader.read(1 << 16)
                    if not data:
                        raise RuntimeError("the front end hung up")
                    self.events += data.count(b"\ndata: ")
                    tail = (tail + data)[-16:]
        finally:
            writer.close()

    @asynccontextmanager
    async def reading(self, clients: int) -> AsyncIterator[None]:
        """Some clients meanwhile, all of them answered once before it begins."""
        tasks = [asyncio.create_task(self.follow()) for _ in range(clients)]
        try:
            while self.begun < clients:
                await asyncio.sleep(0.05)
                for task in tasks:
                    if task.done():
                        task.result()
            await asyncio.sleep(0.5)
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def idle_share(pid: int, seconds: float) -> float:
    """CPU-seconds a second that the process takes while nobody asks for anything."""
    before, start = cpu_clock(pid), time.monotonic()
    await asyncio.sleep(seconds)
    return (cpu_clock(pid) - before) / (time.monotonic() - start)


async def figure(asked: argparse.Namespace, pid: int, kind: str, max_tokens: int, idle: float) -> Figure:
    """One round."""
    reader = Reader(asked.port, kind, max_tokens)
    async with reader.reading(asked.clients):
        before, events, start = cpu_clock(pid), reader.events, time.monotonic()
        await asyncio.sleep(asked.seconds)
        spent, events, seconds = cpu_clock(pid) - before, reader.events - events, time.monotonic() - start
    await asyncio.sleep(0.2)  # the streams that were left are cancelled
    return Figure(kind, max_tokens, events, seconds, spent - idle * seconds)


async def measure(asked: argparse.Namespace, pid: int) -> tuple[float, list[Figure]]:
    """The idle share, and every round; the kinds take turns, so that a slow minute hits all alike."""
    await figure(asked, pid, "completions", ENDLESS, 0.0)  # warms up
    idle = await idle_share(pid, asked.seconds)
    kinds = [(kind, length) for length in (ENDLESS, asked.max_tokens) for kind in BODIES]
    rounds = [await figure(asked, pid, *kind, idle) for _ in range(asked.repeat) for kind in kinds]
    return idle, rounds


def summary(rounds: Sequence[Figure]) -> list[dict[str, object]]:
    """For each kind the median and the spread, in CPU-microseconds an event."""
    rows: list[dict[str, object]] = []
    for kind, length in dict.fromkeys((each.kind, each.max_tokens) for each in rounds):
        mine = [each for each in rounds if (each.kind, each.max_tokens) == (kind, length)]
        costs = [each.micros for each in mine]
        rates = [each.events / each.seconds for each in mine]
        rows.append(
            {
                "endpoint": kind,
                "answers": "endless" if length == ENDLESS else f"{length} tokens",
                "median_us": round(statistics.median(costs), 1),
                "least_us": round(min(costs), 1),
                "most_us": round(max(costs), 1),
                "events_per_second": round(statistics.median(rates)),
            }
        )
    return rows


def table(rows: Sequence[dict[str, object]], idle: float, repeat: int) -> Table:
    """The summary for people."""
    caption = f"medians of {repeat}, less {idle * 1e3:.1f} ms a second when idle; where answers end, requests count too"
    shown = Table(title="CPU-microseconds of the front end an event", caption=caption, padding=(0, 1))
    for heading in ("endpoint", "answers", "median", "least", "most", "events/s"):
        shown.add_column(heading, justify="left" if heading in ("endpoint", "answers") else "right", no_wrap=True)
    for row in rows:
        shown.add_row(*(str(value) for value in row.values()))
    return shown


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.front", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("model", nargs="?", default=settings.DEFAULT_MODEL, help="what serve takes as --model")
    parser.add_argument("--port", type=int, default=8795)
    parser.add_argument("--rate", type=float, default=1000.0, help="tokens a second of the pretend worker")
    parser.add_argument("--clients", type=int, default=32, help="streams at once")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a round")
    parser.add_argument("--repeat", type=int, default=5, help="rounds of each kind, of which the median counts")
    parser.add_argument("--max-tokens", type=int, default=64, help="length of answers where they end")
    parser.add_argument("--limit", type=float, default=50.0, help="exit 1 where endless answers cost more µs an event")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--period", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Measure and print; returns 1 when an event of an endless answer costs more than the limit."""
    asked = arguments(given)
    if asked.worker:
        return pretend(msgspec.json.decode(asked.worker, type=EngineConfig), asked.period)
    if asked.serve:
        return serve(asked.model, asked.port, asked.period)
    model = str(catalog.resolve(asked.model, settings.default_cache()).path)
    period = str(asked.clients / asked.rate)
    command = [sys.executable, "-m", "bench.front", model, "--serve", "--port", str(asked.port), "--period", period]
    with server(command, asked.port) as running:
        idle, rounds = asyncio.run(measure(asked, running.pid))
    rows = summary(rounds)
    if asked.json:
        print(json.dumps({"idle": idle, "summary": rows, "rounds": [asdict(each) for each in rounds]}, indent=1))
    else:
        Console().print(table(rows, idle, asked.repeat))
    costs = [float(str(row["median_us"])) for row in rows if row["answers"] == "endless"]
    return int(max(costs) > asked.limit)


if __name__ == "__main__":
    sys.exit(main())
