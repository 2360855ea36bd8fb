"""A long run above capacity: `python -m bench.soak`, 20 minutes at 1.5 times what the service can do.

Starts a server, measures its capacity in a closed loop, then sends requests at random times at 1.5 times that rate:
streamed and whole, one choice and several, endless ones, clients that leave. Watches the memory of both processes, and
at the end compares what the clients counted with what `/metrics` says.
"""

import argparse
import asyncio
import collections
import json
import random
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
import psutil

from app.settings import DEFAULT_MODEL
from bench.overhead import server

KINDS = ("stream", "whole", "choices", "stopped", "endless", "leaves")
GAUGES = ("streams_open", "streams_queued", "num_requests_running", "num_requests_waiting", "kv_blocks_used")
_SAMPLE = re.compile(r"^everstream_([a-z0-9_]+)(\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass
class Tally:
    """What the clients saw."""

    finished: collections.Counter[str] = field(default_factory=collections.Counter)
    kinds: collections.Counter[str] = field(default_factory=collections.Counter)
    refused: int = 0
    errors: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    left_tokens: int = 0
    left_prompt_tokens: int = 0
    longest: float = 0.0


class Soak:
    """The clients of one run."""

    def __init__(self, session: aiohttp.ClientSession, url: str, seed: int) -> None:
        self.tally = Tally()
        self._session = session
        self._url = url
        self._random = random.Random(seed)

    def request(self, kind: str) -> tuple[dict[str, object], int]:
        """A body of one kind, and how many prompt tokens it has."""
        length = min(1500, max(4, int(self._random.lognormvariate(4.0, 1.0))))
        body: dict[str, object] = {
            "model": "soak",
            "prompt": [self._random.randrange(1000, 40_000) for _ in range(length)],
            "max_tokens": self._random.randint(8, 128),
            "temperature": self._random.choice((0, 0.8)),
            "seed": self._random.randrange(1 << 31),
            "stream": kind != "whole",
        }
        if kind != "whole":
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": kind == "leaves"}
        if kind == "choices":
            body |= {"n": 3, "temperature": 1.0}
        if kind == "stopped":
            body["stop"] = [" the", ".", "\n"]
        if kind == "endless":
            body |= {
                "retention": {"policy": "sinks", "sink_tokens": 4, "window": 60},
                "max_tokens": 200,
                "ignore_eos": True,
            }
        if kind == "leaves":
            body |= {"max_tokens": 2000, "ignore_eos": True}
        return body, length

    async def one(self, kind: str) -> None:
        """Send one request and count what comes of it."""
        tally = self.tally
        body, length = self.request(kind)
        start = time.monotonic()
        try:
            async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
                if answer.status == 429:
                    tally.refused += 1
                    return
                if answer.status != 200:
                    tally.errors.append(f"{answer.status}: {(await answer.text())[:200]}")
                    return
                tally.kinds[kind] += 1
                if kind == "whole":
                    self._whole(await answer.json())
                else:
                    await self._stream(answer, kind == "leaves", length)
        except (TimeoutError, aiohttp.ClientError) as error:
            tally.errors.append(f"{kind}: {type(error).__name__} {error}")
        tally.longest = max(tally.longest, time.monotonic() - start)

    def _whole(self, answer: dict[str, object]) -> None:
        self._usage(answer["usage"])
        self._finish({choice["finish_reason"] for choice in answer["choices"]})  # type: ignore[attr-defined]  # JSON

    async def _stream(self, answer: aiohttp.ClientResponse, leaves: bool, length: int) -> None:
        reasons: set[str] = set()
        usage: dict[str, int] = {}
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                self.tally.errors.append(event["error"]["message"])
                return
            usage = event.get("usage") or usage
            reasons |= {choice["finish_reason"] for choice in event["choices"] if choice["finish_reason"]}
            if leaves and usage.get("completion_tokens", 0) >= 5:
                self.tally.finished["abort"] += 1
                self.tally.left_tokens += usage["completion_tokens"]
                self.tally.prompt_tokens += length
                return
        self._usage(usage)
        self._finish(reasons)

    def _usage(self, usage: object) -> None:
        assert isinstance(usage, dict)
        self.tally.prompt_tokens += usage["prompt_tokens"]
        self.tally.output_tokens += usage["completion_tokens"]

    def _finish(self, reasons: set[str]) -> None:
        self.tally.finished["length" if "length" in reasons else "stop"] += 1

    async def closed_loop(self, clients: int, seconds: float) -> float:
        """Requests a second that the service gives when nobody waits for nothing."""
        done = 0
        end = time.monotonic() + seconds

        async def client() -> None:
            nonlocal done
            while time.monotonic() < end:
                await self.one(self._random.choice(KINDS[:-1]))
                done += 1

        start = time.monotonic()
        await asyncio.gather(*(client() for _ in range(clients)))
        return done / (time.monotonic() - start)

    async def open_loop(self, rate: float, seconds: float) -> int:
        """Requests at random times, whether or not earlier ones have ended; returns how many."""
        tasks: set[asyncio.Task[None]] = set()
        sent = 0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            await asyncio.sleep(self._random.expovariate(rate))
            task = asyncio.create_task(self.one(self._random.choice(KINDS)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            sent += 1
        if tasks:
            await asyncio.wait(tasks, timeout=180)
        if tasks:
            self.tally.errors.append(f"{len(tasks)} requests never ended")
        return sent


async def watch(process: psutil.Process, log: list[tuple[float, int, int]], every: float) -> None:
    """Resident bytes of front end and workers, now and then."""
    start = time.monotonic()
    while True:
        workers = sum(child.memory_info().rss for child in process.children(recursive=True))
        log.append((time.monotonic() - start, process.memory_info().rss, workers))
        await asyncio.sleep(every)


def growth(log: Sequence[tuple[float, int, int]], which: int, after: float) -> float:
    """How much the mean of the last tenth lies above the mean of the first tenth after `after` seconds."""
    values = [row[which] for row in log if row[0] >= after]
    tenth = max(1, len(values) // 10)
    return statistics.mean(values[-tenth:]) / statistics.mean(values[:tenth]) - 1


async def metrics(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Every sample of the service by name."""
    async with session.get(f"{url}/metrics") as answer:
        page = await answer.text()
    return {name + (labels or ""): float(value) for name, labels, value in _SAMPLE.findall(page)}


def compare(tally: Tally, values: dict[str, float]) -> list[tuple[str, float, float, bool]]:
    """(what, clients, service, equal) for every counter that both sides keep."""
    success = 'request_success_total{finished_reason="%s"}'
    reasons = ("stop", "length", "abort")
    rows = [(f"finished, {reason}", tally.finished[reason], values[success % reason]) for reason in reasons]
    rows.append(("failed", len(tally.errors), values[success % "error"]))
    rows.append(("refused", tally.refused, values.get('admission_rejections_total{reason="queue_full"}', 0.0)))
    rows.append(("prompt tokens", tally.prompt_tokens, values["prompt_tokens_total"]))
    checked = [(name, float(ours), theirs, ours == theirs) for name, ours, theirs in rows]
    ours, theirs = tally.output_tokens + tally.left_tokens, values["generation_tokens_total"]
    # A client that leaves has seen a token or two less than was on its way to it.
    checked.append(("output tokens", ours, theirs, 0 <= theirs - ours <= 40 * tally.finished["abort"]))
    return checked


async def run(asked: argparse.Namespace, process: psutil.Process) -> bool:
    """The whole soak; True when everything held."""
    url = f"http://127.0.0.1:{asked.port}"
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        soak = Soak(session, url, asked.seed)
        capacity = await soak.closed_loop(asked.clients, asked.calibrate)
        print(f"capacity {capacity:.2f} requests a second; sending {asked.factor * capacity:.2f}", flush=True)
        log: list[tuple[float, int, int]] = []
        watching = asyncio.create_task(watch(process, log, 2.0))
        sent = await soak.open_loop(asked.factor * capacity, asked.minutes * 60)
        watching.cancel()
        values = await metrics(session, url)
        for _ in range(100):
            if not any(values[name] for name in GAUGES):
                break
            await asyncio.sleep(0.1)
            values = await metrics(session, url)
    return report(soak.tally, values, log, sent, asked)


def report(
    tally: Tally, values: dict[str, float], log: list[tuple[float, int, int]], sent: int, asked: argparse.Namespace
) -> bool:
    """Print what happened; True when everything held."""
    held = True
    print(
        f"{sent} requests sent, refused {tally.refused}; by kind {dict(tally.kinds)}; the longest took "
        f"{tally.longest:.1f} s"
    )
    for error, count in collections.Counter(tally.errors).most_common(5):
        print(f"error, {count} times: {error}")
    for name, ours, theirs, equal in compare(tally, values):
        held &= equal
        print(f"{name}: clients {ours:.0f}, /metrics {theirs:.0f}{'' if equal else '   DIFFERS'}")
    for name in GAUGES:
        held &= values[name] == 0
        print(f"{name} at the end: {values[name]:.0f}")
    after = min(300.0, asked.minutes * 60 / 4)
    for which, name in ((1, "front end"), (2, "workers")):
        grown = growth(log, which, after)
        held &= grown <= 0.02
        print(f"{name}: {log[-1][which] / 1e6:.0f} MB at the end, {grown:+.2%} since second {after:.0f}")
    print("everything held" if held and not tally.errors else "NOT everything held")
    return held and not tally.errors


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="what serve takes as --model")
    parser.add_argument("--port", type=int, default=8770)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--factor", type=float, default=1.5, help="load as a multiple of capacity")
    parser.add_argument("--calibrate", type=float, default=30.0, help="seconds of closed loop before")
    parser.add_argument("--clients", type=int, default=48, help="clients of the closed loop")
    parser.add_argument("--max-waiting", type=int, default=64, help="the service's queue")
    parser.add_argument(
        "--cache-bytes", default="128MiB", help="the KV cache: one that is full early shows what else grows"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Run and report; returns 0 when everything held."""
    asked = arguments(given)
    command = [sys.executable, "-m", "app", "serve", "--model", asked.model, "--port", str(asked.port)]
    command += ["--served-name", "soak", "--max-waiting", str(asked.max_waiting), "--log-level", "warning"]
    command += ["--cache-bytes", asked.cache_bytes]
    with server(command, asked.port) as process:
        return int(not asyncio.run(run(asked, process)))


if __name__ == "__main__":
    sys.exit(main())
