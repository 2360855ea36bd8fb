"""Very long streams through a worker process: resident memory, blocks in use, time per token, tenth by tenth.

Starts `python -m model.worker` and speaks the protocol to it, as the front end does; knows no text and no HTTP.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from model.config import EngineConfig
from model.protocol import Beat, Ready, Rejected, Retention, SamplingParams, Stats, Step, Submit
from model.wire import AsyncConnection

FIRST = 2_000  # tokens after which memory must stay where it is


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--streams", type=int, default=1, help="endless streams at once")
    parser.add_argument("--tokens", type=int, default=100_000, help="tokens of each")
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--window", type=int, default=508)
    parser.add_argument("--beside", type=int, default=0, help="normal requests kept running beside the streams")
    parser.add_argument(
        "--cache-mib", type=int, default=192, help="a cache that is soon touched whole, so growth shows"
    )


@dataclass
class Tally:
    """What was seen: for each step with a stream's token its time, its worker's stats, and each stream's tokens."""

    tokens: dict[str, int] = field(default_factory=dict)
    at: list[float] = field(default_factory=list)
    count: list[int] = field(default_factory=list)
    stats: list[Stats] = field(default_factory=list)
    normal_done: int = 0
    normal_first: list[float] = field(default_factory=list)


class Worker:
    """One worker process and the connection to it."""

    def __init__(self, process: asyncio.subprocess.Process, connection: AsyncConnection, ready: Ready) -> None:
        self.process = process
        self.connection = connection
        self.ready = ready

    @classmethod
    async def start(cls, config: EngineConfig) -> "Worker":
        """Start the process and wait until it is loaded. Raises SystemExit with its own sentence."""
        arrived: asyncio.Queue[AsyncConnection] = asyncio.Queue()
        server = await asyncio.start_unix_server(
            lambda reader, writer: arrived.put_nowait(AsyncConnection(reader, writer)), config.socket
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "model.worker", msgspec.json.encode(config).decode()
        )
        async with server:
            connection = await arrived.get()
        while isinstance(ready := await connection.receive(), Beat):
            pass
        if not isinstance(ready, Ready):
            raise SystemExit("the worker did not come up")
        return cls(process, connection, ready)

    async def stop(self) -> None:
        """Close the connection; the process ends by itself."""
        self.connection.close()
        await self.process.wait()


def stream(name: str, arguments: argparse.Namespace, seed: int, vocabulary: int) -> Submit:
    """An endless stream that ignores ends."""
    prompt = tuple(random.Random(seed).randrange(vocabulary) for _ in range(32))
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=seed, max_tokens=arguments.tokens, ignore_eos=True)
    return Submit(name, 1, prompt, params, Retention("sinks", arguments.sinks, arguments.window))


def normal(number: int, vocabulary: int) -> Submit:
    """A request like any other: 128 tokens in, 64 out."""
    prompt = tuple(random.Random(number).randrange(vocabulary) for _ in range(128))
    return Submit(f"normal-{number}", 1, prompt, SamplingParams(seed=number, max_tokens=64, ignore_eos=True))


async def soak(arguments: argparse.Namespace, model: Path) -> tuple[Tally, Ready]:
    """Run the streams to their end."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="es-"))
        config = EngineConfig(
            model=str(model), name=model.name, socket=f"{folder}/worker", cache_bytes=arguments.cache_mib << 20
        )
        worker = await Worker.start(config)
        stack.push_async_callback(worker.stop)
        tally, vocabulary = Tally(), worker.ready.vocabulary
        sent: dict[str, float] = {}
        for number in range(arguments.streams):
            tally.tokens[f"stream-{number}"] = 0
            worker.connection.send(stream(f"stream-{number}", arguments, number + 1, vocabulary))
        for number in range(arguments.beside):
            submit = normal(number, vocabulary)
            sent[submit.request] = time.monotonic()
            worker.connection.send(submit)
        started, following = time.monotonic(), arguments.beside
        running = set(tally.tokens)
        while running:
            message = await worker.connection.receive()
            if isinstance(message, Rejected):
                raise SystemExit(f"{message.request}: {message.message}")
            if not isinstance(message, Step):
                continue
            for row in message.rows:
                if row.request in tally.tokens:
                    tally.tokens[row.request] += len(row.tokens)
                    if row.finish:
                        running.discard(row.request)
                elif row.tokens and row.index == 0:
                    tally.normal_first.append(time.monotonic() - sent.pop(row.request))
                if row.finish and row.request not in tally.tokens:
                    tally.normal_done += 1
                    submit = normal(following, vocabulary)
                    sent[submit.request] = time.monotonic()
                    following += 1
                    worker.connection.send(submit)
            tally.at.append(time.monotonic() - started)
            tally.count.append(sum(tally.tokens.values()))
            tally.stats.append(message.stats)
        return tally, worker.ready


def run(arguments: argparse.Namespace, model: Path) -> int:
    """Soak, print the figures; 1 where they do not hold."""
    tally, ready = asyncio.run(soak(arguments, model))
    total = tally.count[-1]
    print(
        f"{arguments.streams} streams of {arguments.tokens} tokens, {arguments.sinks} sinks + {arguments.window} recent"
    )
    after = next(place for place, count in enumerate(tally.count) if count >= FIRST * arguments.streams)
    resident = [stats.resident_bytes for stats in tally.stats[after:]]
    blocks = [stats.blocks_used for stats in tally.stats[after:-1]]
    spread = max(resident) / min(resident) - 1
    print(f"resident memory after {FIRST} tokens each: {min(resident) / 1e6:.1f} to {max(resident) / 1e6:.1f} MB "
          f"({spread:.2%})")  # fmt: skip
    print(f"blocks in use: {min(blocks)} to {max(blocks)} of {ready.num_blocks}")
    tenths: list[float] = []
    for tenth in range(10):
        first = next(p for p, count in enumerate(tally.count) if count >= total * tenth / 10)
        last = next(p for p, count in enumerate(tally.count) if count >= total * (tenth + 1) / 10)
        # Medians of short pieces, so that what else the machine did for a moment does not count.
        pieces = range(first, last - 100, 100)
        rates = [(tally.at[p + 100] - tally.at[p]) / (tally.count[p + 100] - tally.count[p]) for p in pieces]
        tenths.append(statistics.median(rates))
    print("ms per token, by tenths: " + " ".join(f"{1e3 * one:.2f}" for one in tenths))
    print(
        f"last tenth against the second: {tenths[9] / tenths[1] - 1:+.1%}; {total / tally.at[-1]:.0f} tokens/s in all"
    )
    if tally.normal_done:
        firsts = statistics.median(tally.normal_first)
        print(f"beside them {tally.normal_done} normal requests ended; median time to first token {firsts:.3f} s")
    alone = arguments.beside == 0
    held = spread < 0.01 and abs(tenths[9] / tenths[1] - 1) < 0.1
    return 0 if held and (not alone or max(blocks) - min(blocks) <= arguments.streams) else 1
