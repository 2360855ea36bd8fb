"""What metrics, logs and supervision cost together: `python -m bench.overhead`.

Two servers on the same model, one as it is served, one with observers that count nothing, no log line and no watch;
the same load goes to each in turn, and CPU-seconds of both processes a token are compared pair by pair.
"""

import argparse
import asyncio
import contextlib
import logging
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import uvloop

from app import catalog, settings
from app import main as front
from app.generation import Generation, Timings, Usage
from app.metrics import Metrics
from app.process import launch_all
from app.supervisor import Supervisor
from app.text.tokenizer import load_tokenizer
from bench.serve import Work, load
from model.protocol import Stats, Step

NAME = "overhead"


class Silent(Metrics):
    """Metrics that are never fed."""

    def token_gap(self, seconds: float, now: float) -> None:
        """Nothing."""

    def first_token(self, seconds: float, now: float) -> None:
        """Nothing."""

    def finished(self, asked: Generation, usage: Usage, timings: Timings, reason: str) -> None:  # type: ignore[override]  # same caller
        """Nothing."""

    def http_request(self, route: str, method: str, status: int) -> None:
        """Nothing."""

    def worker_step(self, slot: int, step: Step, before: Stats) -> None:
        """Nothing."""


class Unwatched(Supervisor):
    """A supervisor that never looks whether its workers are alive."""

    async def _watch(self) -> None:
        await asyncio.Event().wait()


def serve_bare(flags: dict[str, object]) -> int:
    """The server without what is measured here."""
    chosen = settings.load(**flags)
    configs = chosen.engine_configs(Path(chosen.model), NAME)
    launched = launch_all(configs)
    logging.disable(logging.CRITICAL)
    silent = Silent()
    supervisor = Unwatched(configs, silent, launched)
    app = front.create_app(chosen, supervisor, load_tokenizer(chosen.model), silent, model=NAME)
    return uvloop.run(front.run_until_signal(chosen, supervisor, app, front.listen(chosen.host, chosen.port)))


@contextlib.contextmanager
def server(command: Sequence[str], port: int) -> Iterator[psutil.Process]:
    """A server of its own process, ready to serve; ended at the end."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            end = time.monotonic() + 120
            while time.monotonic() < end and not _ready(port):
                if process.poll() is not None:
                    log.seek(0)
                    raise SystemExit(log.read().decode(errors="replace"))
                time.sleep(0.2)
            yield psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(20)


def _ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def cpu_clock(pid: int) -> float:
    """User and system seconds so far of all threads of a process, to the nanosecond.

    The clock of another process, as clock_getcpuclockid(3) makes it; /proc counts in hundredths of a second.
    """
    return time.clock_gettime(~pid << 3 | 2)


def cpu_seconds(process: psutil.Process) -> tuple[float, float]:
    """User and system seconds so far of the front end, and of its workers."""
    return cpu_clock(process.pid), sum(cpu_clock(child.pid) for child in process.children(recursive=True))


async def measure(work: Work, process: psutil.Process, clients: int, requests: int, seed: int) -> tuple[float, float]:
    """CPU-seconds a token of front end and workers under one run of the load."""
    before = cpu_seconds(process)
    result = await load(work, clients, requests, seed)
    after = cpu_seconds(process)
    tokens = result.output_tokens
    return (after[0] - before[0]) / tokens, (after[1] - before[1]) / tokens


async def compare(
    asked: argparse.Namespace, full: psutil.Process, bare: psutil.Process
) -> list[tuple[float, float, float, float]]:
    """(front end full, workers full, front end bare, workers bare) for each pair."""
    pairs = []
    for number in range(asked.pairs + 1):
        row: dict[str, tuple[float, float]] = {}
        order = [("full", full, asked.port, asked.model), ("bare", bare, asked.port + 1, NAME)]
        for name, process, port, model in order if number % 2 else reversed(order):
            work = Work(f"http://127.0.0.1:{port}", model, 32, asked.max_tokens)
            row[name] = await measure(work, process, asked.clients, asked.requests, number)
        if number:  # the first pair warms both up
            pairs.append((*row["full"], *row["bare"]))
    return pairs


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("model", nargs="?", default=settings.DEFAULT_MODEL, help="what serve takes as --model")
    parser.add_argument("--port", type=int, default=8760, help="the first of two ports")
    parser.add_argument("--pairs", type=int, default=10, help="paired runs")
    parser.add_argument("--clients", type=int, default=32, help="concurrency")
    parser.add_argument("--requests", type=int, default=64, help="requests a run")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens an answer")
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Measure and print; returns 1 when the median is over two per cent."""
    asked = arguments(given)
    if asked.bare:
        return serve_bare({"model": asked.model, "port": asked.port})
    asked.model = str(catalog.resolve(asked.model, settings.default_cache()).path)
    common = [sys.executable, "-m"]
    serve = [*common, "app", "serve", "--model", asked.model, "--port", str(asked.port), "--served-name", asked.model]
    bare = [*common, "bench.overhead", asked.model, "--bare", "--port", str(asked.port + 1)]
    with server(serve, asked.port) as full_process, server(bare, asked.port + 1) as bare_process:
        pairs = asyncio.run(compare(asked, full_process, bare_process))
    shares = []
    for full_front, full_worker, bare_front, bare_worker in pairs:
        shares.append((full_front - bare_front) / (bare_front + bare_worker))
        print(
            f"front end {full_front * 1e6:6.0f} µs a token, bare {bare_front * 1e6:6.0f}; workers "
            f"{full_worker * 1e6:6.0f}, bare {bare_worker * 1e6:6.0f}; difference of the front ends "
            f"{shares[-1]:+.2%} of the whole, of both processes "
            f"{(full_front + full_worker) / (bare_front + bare_worker) - 1:+.2%}"
        )
    whole = [(a + b) / (c + d) - 1 for a, b, c, d in pairs]
    print(f"median of {len(pairs)} pairs: front ends {statistics.median(shares):+.2%}, both processes "
          f"{statistics.median(whole):+.2%} CPU-seconds a token")  # fmt: skip
    return int(statistics.median(shares) > 0.02)


if __name__ == "__main__":
    sys.exit(main())
