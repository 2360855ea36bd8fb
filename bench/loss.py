"""What the worker loses to the front end: `python -m bench.loss`.

Two workers of one model, one behind the real front end and asked over HTTP, one asked through its socket by this
process; the same prompts go to both in turn (HTTP, socket, socket, HTTP), and the workers' CPU-seconds a token are
compared pair by pair. Tokens a second are told beside them: there the front end's own share of the cores shows.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import aiohttp
import psutil
from rich.console import Console
from rich.table import Table

from app import catalog, settings
from app.process import Launched
from app.text.tokenizer import Tokenizer, load_tokenizer
from bench.overhead import cpu_clock, server
from bench.serve import Work, ask, prompts
from model.protocol import Beat, Failed, Ready, Rejected, SamplingParams, Step, Submit
from model.wire import AsyncConnection

NAME = "loss"


@dataclass(frozen=True)
class Cost:
    """One run: the worker's CPU-seconds a token, and tokens a second."""

    cpu_seconds: float
    rate: float


class Direct:
    """A worker of our own, asked without anything between."""

    def __init__(self, connection: AsyncConnection, pid: int, tokenizer: Tokenizer) -> None:
        self.pid = pid
        self._connection = connection
        self._tokenizer = tokenizer
        self._number = 0

    @classmethod
    async def meet(cls, launched: Launched, tokenizer: Tokenizer) -> "Direct":
        """Wait until the worker is loaded. Raises SystemExit where it is not what it should be."""
        peer, _ = await asyncio.get_running_loop().sock_accept(launched.listener)
        connection = AsyncConnection(*await asyncio.open_unix_connection(sock=peer))
        while isinstance(ready := await connection.receive(), Beat):
            pass
        if not isinstance(ready, Ready):
            raise SystemExit(f"the worker said {ready!r} where Ready was due")
        return cls(connection, launched.process.pid, tokenizer)

    async def run(self, asked: argparse.Namespace, texts: Sequence[str]) -> int:
        """All texts, so many at a time; returns the tokens that came."""
        queue = [tuple(self._tokenizer.encode(text)) for text in texts]
        params = SamplingParams(temperature=0.0, max_tokens=asked.max_tokens, ignore_eos=True)
        open_now = tokens = 0
        while queue or open_now:
            while queue and open_now < asked.clients:
                self._number, open_now = self._number + 1, open_now + 1
                ids = queue.pop()
                self._connection.send(Submit(str(self._number), 1, ids, params, prompt_length=len(ids)))
            message = await self._connection.receive()
            if isinstance(message, Rejected | Failed):
                raise SystemExit(f"the worker refused: {message.message}")
            if isinstance(message, Step):
                tokens += sum(len(row.tokens) for row in message.rows)
                open_now -= sum(bool(row.finish) for row in message.rows)
        return tokens


async def over_http(asked: argparse.Namespace, texts: Sequence[str]) -> int:
    """The same over HTTP, with a connection for each client."""
    work = Work(f"http://127.0.0.1:{asked.port}", NAME, asked.words, asked.max_tokens)
    queue, tokens = list(texts), 0
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=900)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def client() -> None:
            nonlocal tokens
            while queue:
                answer = await ask(session, work, queue.pop(), asked.max_tokens)
                tokens += answer.output_tokens

        await asyncio.gather(*(client() for _ in range(asked.clients)))
    return tokens


async def compare(asked: argparse.Namespace, worker: int, launched: Launched, model: str) -> list[dict[str, Cost]]:
    """The cost both ways for each pair."""
    direct = await Direct.meet(launched, load_tokenizer(model))
    pairs = []
    for number in range(asked.pairs + 1):
        texts = prompts(asked.requests, asked.words, seed=number)
        row: dict[str, Cost] = {}
        for way in ("http", "socket") if number % 2 else ("socket", "http"):
            pid = worker if way == "http" else direct.pid
            before, start = cpu_clock(pid), time.monotonic()
            tokens = await (over_http(asked, texts) if way == "http" else direct.run(asked, texts))
            row[way] = Cost((cpu_clock(pid) - before) / tokens, tokens / (time.monotonic() - start))
        if number:  # the first pair warms both up
            pairs.append(row)
    return pairs


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.loss", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("model", nargs="?", default=settings.DEFAULT_MODEL, help="what serve takes as --model")
    parser.add_argument("--port", type=int, default=8797)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--clients", type=int, default=32, help="requests at once")
    parser.add_argument("--requests", type=int, default=64, help="requests a run")
    parser.add_argument("--words", type=int, default=32, help="words in a prompt")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens in an answer")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Measure and print; returns 1 when the worker's median loss is over five per cent."""
    asked = arguments(given)
    path = catalog.resolve(asked.model, settings.default_cache()).path
    (config,) = settings.load(model=str(path)).engine_configs(path, NAME)
    command = [sys.executable, "-m", "app", "serve", "--model", str(path), "--port", str(asked.port)]
    with server([*command, "--served-name", NAME], asked.port) as process:
        (worker,) = (child.pid for child in process.children(recursive=True) if _is_worker(child))
        launched = Launched(config)
        try:
            pairs = asyncio.run(compare(asked, worker, launched, str(path)))
        finally:
            launched.kill()
            launched.close()
    losses = [pair["http"].cpu_seconds / pair["socket"].cpu_seconds - 1 for pair in pairs]
    if asked.json:
        print(json.dumps([{way: asdict(cost) for way, cost in pair.items()} for pair in pairs]))
    else:
        title = f"the worker's CPU-microseconds a token, {asked.clients} requests at once"
        shown = Table("over HTTP", "socket", "loss", "tok/s HTTP", "tok/s socket", title=title, padding=(0, 1))
        for pair, loss in zip(pairs, losses, strict=True):
            http, socket = pair["http"], pair["socket"]
            micros = (f"{http.cpu_seconds * 1e6:.0f}", f"{socket.cpu_seconds * 1e6:.0f}")
            shown.add_row(*micros, f"{loss:+.2%}", f"{http.rate:.0f}", f"{socket.rate:.0f}")
        Console().print(shown, f"median loss of {len(losses)} pairs: {statistics.median(losses):+.2%}")
    return int(statistics.median(losses) > 0.05)


def _is_worker(process: psutil.Process) -> bool:
    return "model.worker" in process.cmdline()


if __name__ == "__main__":
    sys.exit(main())
