"""Closed-loop load on a running server over HTTP: `python -m bench.serve`.

C clients, each sending its next request when its last one ended: completions of 128 common English words (one token
each for most vocabularies), 64 tokens out, greedy, end of sequence ignored, streamed, a connection a request. Works
against any server with OpenAI's completions; knows nothing of ours. Reports medians over the repetitions.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

try:
    import aiohttp
except ImportError:
    sys.exit(
        "error: the benchmark needs the package aiohttp, which is not installed: `make bench` brings it along, "
        "and so does `pip install 'everstream[bench]'`"
    )

SENTENCE = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were her all she there would their we him been has when who will more no if out so said what up its about "
    "into than them can only other new some could time these two may then do first any my now such like our over man"
)
WORDS = SENTENCE.split()


class Refused(Exception):
    """The server answered with something else than a stream; the text is what it said."""


@dataclass(frozen=True)
class Work:
    """What is asked: where, of which model, how long the prompts and the answers are."""

    url: str
    model: str
    words: int
    max_tokens: int
    api_key: str = ""


@dataclass
class Answer:
    """One request's times in seconds and its counts in tokens."""

    first: float = 0.0
    whole: float = 0.0
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True)
class Result:
    """One run: rates in tokens a second, times in seconds."""

    concurrency: int
    requests: int
    wall: float
    output_tokens: int
    prompt_tokens: int
    output_rate: float
    first_p50: float
    first_p99: float
    gap_p50: float
    gap_p99: float
    whole_p50: float


def prompts(count: int, words: int, seed: int = 0) -> list[str]:
    """`count` prompts of `words` common English words, the same for the same seed."""
    draw = random.Random(seed)
    return [" ".join(draw.choice(WORDS) for _ in range(words)) for _ in range(count)]


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie; 0.0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


async def ask(session: aiohttp.ClientSession, work: Work, prompt: str, max_tokens: int) -> Answer:
    """One streamed completion. Raises Refused when the server does not stream it to its end."""
    body = {"model": work.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    start = last = time.perf_counter()
    answer = Answer()
    async with session.post(f"{work.url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise Refused(f"HTTP {response.status}: {(await response.text())[:500]}")
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise Refused(event["error"]["message"])
            if usage := event.get("usage"):
                answer.prompt_tokens, answer.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            if event.get("choices"):
                now = time.perf_counter()
                if answer.first:
                    answer.gaps.append(now - last)
                else:
                    answer.first = now - start
                last = now
    answer.whole = last - start
    return answer


async def load(work: Work, concurrency: int, requests: int, seed: int = 0) -> Result:
    """Put `requests` requests on the server, `concurrency` at a time, after one to warm it up."""
    queue = prompts(requests, work.words, seed)
    headers = {"Authorization": f"Bearer {work.api_key}"} if work.api_key else {}
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=900)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers) as session:
        await ask(session, work, "warm up", 8)
        answers: list[Answer] = []

        async def client() -> None:
            while queue:
                answers.append(await ask(session, work, queue.pop(), work.max_tokens))

        start = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(concurrency)))
        wall = time.perf_counter() - start
    output = sum(answer.output_tokens for answer in answers)
    gaps = [gap for answer in answers for gap in answer.gaps]
    firsts = [answer.first for answer in answers]
    return Result(
        concurrency=concurrency,
        requests=requests,
        wall=wall,
        output_tokens=output,
        prompt_tokens=sum(answer.prompt_tokens for answer in answers),
        output_rate=output / wall,
        first_p50=quantile(firsts, 0.5),
        first_p99=quantile(firsts, 0.99),
        gap_p50=quantile(gaps, 0.5),
        gap_p99=quantile(gaps, 0.99),
        whole_p50=quantile([answer.whole for answer in answers], 0.5),
    )


def median_of(results: Sequence[Result]) -> Result:
    """The run whose output rate is the median one (the lower of two)."""
    return sorted(results, key=lambda result: result.output_rate)[(len(results) - 1) // 2]


def table(work: Work, runs: Sequence[Sequence[Result]]) -> Table:
    """A row for each concurrency, medians over its repetitions, with the spread of the output rate."""
    title = f"{work.model}: {work.words} words in, {work.max_tokens} tokens out, greedy"
    shown = Table(title=title, caption="times in ms, 50th and 99th percentile; whole: a request, in s", padding=(0, 1))
    for heading in ("clients", "requests", "tok/s", "spread", "first", "p99", "gap", "p99", "whole"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for results in runs:
        middle = median_of(results)
        rates = [result.output_rate for result in results]
        spread = f"{min(rates):.0f}–{max(rates):.0f}" if len(rates) > 1 else "–"
        times = (middle.first_p50, middle.first_p99, middle.gap_p50, middle.gap_p99)
        shown.add_row(
            str(middle.concurrency),
            str(middle.requests),
            f"{statistics.median(rates):.1f}",
            spread,
            *(f"{seconds * 1e3:.1f}" for seconds in times),
            f"{middle.whole_p50:.2f}",
        )
    return shown


async def first_model(url: str, api_key: str) -> str:
    """The name of the first model that the server lists."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with aiohttp.ClientSession(headers=headers) as session, session.get(f"{url}/v1/models") as response:
        if response.status != 200:
            raise Refused(f"HTTP {response.status} from /v1/models")
        return str((await response.json())["data"][0]["id"])


async def measure(asked: argparse.Namespace) -> tuple[Work, list[list[Result]]]:
    """All runs: the concurrencies in turn, and that as often as asked, so that a slow minute hits all alike."""
    model = asked.model or await first_model(asked.url, asked.api_key)
    work = Work(asked.url.rstrip("/"), model, asked.words, asked.max_tokens, asked.api_key)
    runs: dict[int, list[Result]] = {concurrency: [] for concurrency in asked.concurrency}
    for repetition in range(asked.repeat):
        for concurrency in asked.concurrency:
            requests = asked.requests or max(8, 4 * concurrency)
            # Other prompts in each repetition: a prefix cache must not know them.
            seed = 0 if asked.same_prompts else 1000 * repetition + concurrency
            runs[concurrency].append(await load(work, concurrency, requests, seed))
    return work, list(runs.values())


def numbers(text: str) -> list[int]:
    """Numbers between commas."""
    return [int(part) for part in text.split(",")]


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.serve", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server")
    parser.add_argument("--model", default="", help="model to ask for; the server's first by default")
    parser.add_argument("--api-key", default="", help="key of the server")
    parser.add_argument("--concurrency", type=numbers, default=[1, 8, 32], metavar="N,N,…", help="clients at once")
    parser.add_argument("--requests", type=int, default=0, help="requests a run; by default 4 a client, at least 8")
    parser.add_argument("--words", type=int, default=128, help="words in a prompt")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens in an answer")
    parser.add_argument("--repeat", type=int, default=1, help="repetitions, of which the median is shown")
    parser.add_argument("--same-prompts", action="store_true", help="the same prompts in each repetition")
    parser.add_argument("--json", action="store_true", help="print every run as JSON instead of a table")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    asked = arguments(given)
    try:
        work, runs = asyncio.run(measure(asked))
    except (Refused, aiohttp.ClientError, OSError) as error:
        print(f"error: {asked.url}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if asked.json:
        records: list[dict[str, Any]] = [asdict(result) for results in runs for result in results]
        print(json.dumps({"work": {**asdict(work), "api_key": ""}, "runs": records}, indent=1))
    else:
        Console().print(table(work, runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
