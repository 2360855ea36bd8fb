"""What somebody looking at the live view costs the server: `python -m bench.feed MODEL`.

One server under one load that never pauses; a reader of `/live` comes and goes, in short slices of time in the order
with, without, without, with. CPU-seconds of front end and worker a token are compared within each four slices, so
that a drift of the machine cancels; the median of many is told. Knows the feed's address only.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import aiohttp
import psutil
from rich.console import Console
from rich.table import Table

from bench.overhead import cpu_seconds, server
from bench.serve import Refused, prompts

WORDS = 32
ORDER = (True, False, False, True)


@dataclass
class Slice:
    """One slice of time: CPU-seconds of front end and workers, and the tokens that came to the clients."""

    front: float = 0.0
    workers: float = 0.0
    tokens: int = 0

    def __add__(self, other: "Slice") -> "Slice":
        return Slice(self.front + other.front, self.workers + other.workers, self.tokens + other.tokens)


class Load:
    """Clients that ask without a pause and count the tokens, one an event."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self._url = f"http://127.0.0.1:{asked.port}"
        self._asked = asked
        self._prompts = prompts(4096, WORDS, seed=1)
        self._next = 0
        self.tokens = 0

    async def client(self, session: aiohttp.ClientSession, first: int) -> None:
        """One client until it is cancelled; answers differ in length, so that no two slices differ in prompts."""
        length = first
        while True:
            self._next += 1
            body = {"model": self._asked.model, "prompt": self._prompts[self._next % len(self._prompts)]}
            body |= {"max_tokens": length, "temperature": 0, "ignore_eos": True, "stream": True}
            async with session.post(f"{self._url}/v1/completions", json=body) as response:
                if response.status != 200:
                    raise Refused(f"HTTP {response.status}: {(await response.text())[:300]}")
                async for data in response.content.iter_any():
                    self.tokens += data.count(b"data: {")
            length = self._asked.max_tokens

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The load meanwhile; its clients begin spread over the length of an answer."""
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            clients, longest = self._asked.clients, self._asked.max_tokens
            firsts = [max(1, longest * (number + 1) // clients) for number in range(clients)]
            tasks = [asyncio.create_task(self.client(session, first)) for first in firsts]
            try:
                yield
                for task in tasks:
                    if task.done():
                        task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


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


async def one_slice(asked: argparse.Namespace, process: psutil.Process, load: Load, watched: bool) -> Slice:
    """What both processes took for the tokens of one slice. The reader's coming and going lies outside of it."""
    async with contextlib.AsyncExitStack() as stack:
        url = f"http://127.0.0.1:{asked.port}"
        read = await stack.enter_async_context(watcher(url)) if watched else [1]
        await asyncio.sleep(0.5)
        before, tokens = cpu_seconds(process), load.tokens
        await asyncio.sleep(asked.seconds)
        after, tokens = cpu_seconds(process), load.tokens - tokens
        if not read[0]:
            raise SystemExit("the feed sent nothing: is this server's /live open?")
    return Slice(after[0] - before[0], after[1] - before[1], tokens)


async def compare(asked: argparse.Namespace, process: psutil.Process) -> list[tuple[float, float]]:
    """For each four slices what watching adds: its share of all CPU-seconds a token, and of the front end's own."""
    load, shares = Load(asked), []
    async with load.running():
        await asyncio.sleep(2 * asked.seconds)  # warms up
        for _ in range(asked.fours):
            spent = {True: Slice(), False: Slice()}
            for watched in ORDER:
                spent[watched] += await one_slice(asked, process, load, watched)
            seen, unseen = spent[True], spent[False]
            per = {key: (each.front + each.workers) / each.tokens for key, each in spent.items()}
            front = seen.front / seen.tokens - unseen.front / unseen.tokens
            shares.append((per[True] / per[False] - 1, front / per[False]))
    return shares


def main(given: Sequence[str] | None = None) -> int:
    """Measure and print; returns 1 when the front end's median share is over one per cent.

    The feed is read in the front end alone, so its difference is the cost; that of both processes has the same
    median with the worker's scatter upon it.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.feed", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("model", help="a .gguf file or a model folder")
    parser.add_argument("--port", type=int, default=8790)
    parser.add_argument("--fours", type=int, default=20, help="comparisons, of four slices each")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a slice")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    asked = parser.parse_args(given)
    command = [sys.executable, "-m", "app", "serve", "--model", asked.model, "--port", str(asked.port)]
    with server([*command, "--served-name", asked.model], asked.port) as process:
        shares = asyncio.run(compare(asked, process))
    both, front = ([pair[index] for pair in shares] for index in (0, 1))
    if asked.json:
        print(json.dumps({"both": both, "front": front}))
    else:
        title = f"what an open live view adds to the CPU-seconds a token, {len(shares)} comparisons"
        shown = Table("counted", "median", "quarter", "three quarters", title=title, padding=(0, 1))
        for name, values in (("front end, share of the whole", front), ("both processes", both)):
            low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
            shown.add_row(name, f"{middle:+.2%}", f"{low:+.2%}", f"{high:+.2%}")
        Console().print(shown)
    return int(statistics.median(front) > 0.01)


if __name__ == "__main__":
    sys.exit(main())
