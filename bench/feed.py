"""What somebody looking at the live view costs the server: `python -m bench.feed MODEL`.

One server; the same load with and without a reader of `/live`, in turn; CPU-seconds of front end and worker a
token are compared pair by pair. Knows the feed's address only.
"""

import argparse
import asyncio
import contextlib
import statistics
import sys
from collections.abc import AsyncIterator, Sequence

import aiohttp
import psutil

from bench.overhead import measure, server
from bench.serve import Work


@contextlib.asynccontextmanager
async def watcher(url: str) -> AsyncIterator[list[int]]:
    """Read the feed meanwhile; gives a list whose one number counts the bytes read."""
    read = [0]

    async def follow() -> None:
        async with aiohttp.ClientSession() as session, session.get(url + "/live") as answer:
            async for data in answer.content.iter_any():
                read[0] += len(data)

    task = asyncio.create_task(follow())
    try:
        yield read
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def compare(asked: argparse.Namespace, process: psutil.Process) -> list[float]:
    """The share that watching adds, of all CPU-seconds a token, for each pair."""
    work = Work(f"http://127.0.0.1:{asked.port}", asked.model, 32, asked.max_tokens)
    shares = []
    for number in range(asked.pairs + 1):
        spent: dict[bool, tuple[float, float]] = {}
        for watched in (True, False) if number % 2 else (False, True):
            async with contextlib.AsyncExitStack() as stack:
                read = await stack.enter_async_context(watcher(work.url)) if watched else [1]
                spent[watched] = await measure(work, process, asked.clients, asked.requests, number)
            if not read[0]:
                raise SystemExit("the feed sent nothing: is this server's /live open?")
        if number:  # the first pair warms up
            shares.append(sum(spent[True]) / sum(spent[False]) - 1)
            front = spent[True][0] - spent[False][0]
            print(f"both processes {shares[-1]:+.2%}; the front end alone {front * 1e6:+.1f} µs a token")
    return shares


def main(given: Sequence[str] | None = None) -> int:
    """Measure and print; returns 1 when the median is over one per cent."""
    parser = argparse.ArgumentParser(prog="python -m bench.feed", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("model", help="a .gguf file or a model folder")
    parser.add_argument("--port", type=int, default=8790)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    asked = parser.parse_args(given)
    command = [sys.executable, "-m", "app", "serve", "--model", asked.model, "--port", str(asked.port)]
    with server([*command, "--served-name", asked.model], asked.port) as process:
        shares = asyncio.run(compare(asked, process))
    median = statistics.median(shares)
    print(f"median of {len(shares)} pairs: {median:+.2%} CPU-seconds a token with the live view open")
    return int(median > 0.01)


if __name__ == "__main__":
    sys.exit(main())
