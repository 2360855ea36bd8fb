"""Thousands of random bodies against a running server: `python -m bench.fuzz --bodies 5000`.

Good requests with fields made wrong, requests of random fields, damaged JSON and plain bytes, streamed and whole, some
given up half way. Afterwards: no 500, no answer that took too long, gauges at zero, memory where it was.
"""

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
GAUGES = ("streams_open", "num_requests_running", "num_requests_waiting", "kv_blocks_used")
MEMORY = ("front_end_resident_memory_bytes", "worker_resident_memory_bytes")
TEXTS = (
    "",
    "a",
    "Hello there",
    "나는 밥을 먹었다 🥹",
    "\x00\x01",
    "a" * 3000,
    "<|im_end|>",
    "{{ 7*7 }}",
    "\n" * 50,
    "' OR 1=1 --",
)
NUMBERS = (
    0,
    1,
    -1,
    2,
    16,
    0.5,
    1.0,
    -0.0,
    1e9,
    -1e9,
    2**31,
    2**63,
    -(2**63),
    2**64,
    1e308,
    1e-308,
    49151,
    49152,
    8192,
    20,
    21,
)
FIELDS = (
    *("temperature", "dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p", "typical_p", "top_n_sigma"),
    *("xtc_probability", "xtc_threshold", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_range"),
    *("dry_sequence_breakers", "repetition_penalty", "presence_penalty", "frequency_penalty", "penalty_range"),
    *("logit_bias", "bad_words", "allowed_token_ids", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids"),
    *("include_stop_str_in_output", "skip_special_tokens", "ignore_eos", "n", "prompt_logprobs", "stream"),
    *("stream_options", "retention", "trace", "watch", "timeout", "priority", "prompt", "messages", "echo", "logprobs"),
    *("top_logprobs", "best_of", "model", "user", "suffix", "response_format", "tools", "chat_template"),
    *("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "max_completion_tokens", "tokens"),
    *("add_special_tokens", "policy", "window", "sink_tokens", "no_such_field"),
)
SENSIBLE: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 0.7, 1.5, 2),
    "top_k": (-1, 0, 1, 40, 10**6),
    "top_p": (0.01, 0.9, 1),
    "min_p": (0, 0.1, 1),
    "typical_p": (0.01, 0.5),
    "top_n_sigma": (0.01, 1, 50),
    "dynatemp_range": (0.5, 2),
    "xtc_probability": (0.5, 1),
    "dry_multiplier": (0.8, 10),
    "repetition_penalty": (1e-6, 0.5, 1.3, 10),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "penalty_range": (1, 64),
    "logit_bias": ({"5": -100, "6": 100}, {str(i): -100 for i in range(1000)}),
    "bad_words": (["the", "a"],),
    "allowed_token_ids": ([5], [1, 2, 3], list(range(2000))),
    "seed": (0, -(2**63), 2**63 - 1),
    "max_tokens": (1, 2, 5, 12),
    "min_tokens": (0, 1),
    "stop": ("a", ["e", " the"], ["\n"]),
    "stop_token_ids": ([2], [5, 6, 7]),
    "ignore_eos": (True, False),
    "n": (1, 2, 5),
    "stream": (True, True, False),
    "prompt_logprobs": (0, 3),
    "trace": (0, 5, 20),
    "watch": (True,),
    "retention": ({"policy": "sinks", "window": 64}, {"policy": "window", "window": 32}, {"policy": "none"}),
    "priority": (-5, 5),
    "timeout": (0.05, 30),
}


@dataclass
class Findings:
    """What the answers were, and what must not have been."""

    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest: float = 0.0


def value(draw: random.Random, depth: int = 0) -> Any:
    """Any JSON value."""
    kind = draw.randrange(8 if depth < 3 else 5)
    if kind == 0:
        return draw.choice((None, True, False))
    if kind in (1, 2):
        return draw.choice(NUMBERS)
    if kind in (3, 4):
        return draw.choice(TEXTS)
    if kind == 5:
        return {draw.choice(FIELDS): value(draw, depth + 1) for _ in range(draw.randrange(4))}
    return [value(draw, depth + 1) for _ in range(draw.randrange(4))]


def good(draw: random.Random, path: str) -> dict[str, Any]:
    """A request that should be served."""
    if path == "/detokenize":
        return {"tokens": [draw.randrange(49152) for _ in range(draw.randrange(30))]}
    if path == "/tokenize":
        return {"prompt": draw.choice(TEXTS)}
    body: dict[str, Any] = {"max_tokens": draw.randrange(1, 9)}
    for name in draw.sample(list(SENSIBLE), draw.randrange(8)):
        body[name] = draw.choice(SENSIBLE[name])
    if path == "/v1/completions":
        ids = [draw.randrange(49152) for _ in range(draw.randrange(1, 40))]
        body["prompt"] = draw.choice((draw.choice(TEXTS), ids, [draw.choice(TEXTS), "x"], [ids, [5]]))
        body |= draw.choice(({}, {"echo": True}, {"logprobs": 2}, {"echo": True, "logprobs": 1}))
    else:
        roles = ("system", "user", "assistant", "developer")
        said = [{"role": draw.choice(roles), "content": draw.choice(TEXTS)} for _ in range(draw.randrange(1, 4))]
        body["messages"] = said
        body |= draw.choice(({}, {"logprobs": True, "top_logprobs": 3}, {"continue_final_message": True}))
    return body


def body_of(draw: random.Random, path: str) -> bytes:
    """The bytes of one request, good, wrong, or no request at all."""
    kind = draw.random()
    body = good(draw, path)
    if kind < 0.35:
        return json.dumps(body).encode()
    if kind < 0.75:
        for name in draw.sample(FIELDS, draw.randrange(1, 4)):
            body[name] = value(draw)
        if isinstance(body.get("max_tokens"), int) and body["max_tokens"] > 64:
            body["max_tokens"] = 64  # long answers are no faults, they only take long
        return json.dumps(body).encode()
    if kind < 0.85:
        return json.dumps(value(draw)).encode()
    data = bytearray(json.dumps(body).encode())
    for _ in range(draw.randrange(1, 6)):
        place = draw.randrange(len(data))
        data[place : place + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
    return bytes(data)


async def send(session: aiohttp.ClientSession, url: str, draw: random.Random, found: Findings, limit: float) -> None:
    """One request, its answer read whole or given up half way."""
    path = draw.choice(PATHS[:2] * 3 + PATHS[2:])
    data = body_of(draw, path)
    kind = draw.choice(("application/json",) * 20 + ("text/plain", "application/json; charset=utf-8", ""))
    leaves = draw.random() < 0.1
    start = time.monotonic()
    try:
        async with session.post(url + path, data=data, headers={"Content-Type": kind}) as response:
            found.statuses[f"{response.status}"] += 1
            answer = await (response.content.read(200) if leaves else response.read())
            judge(found, path, data, response.status, answer)
    except (aiohttp.ClientError, TimeoutError) as error:
        found.faults.append(f"{path} {data[:300]!r}: {type(error).__name__} {error}")
    seconds = time.monotonic() - start
    found.slowest = max(found.slowest, seconds)
    if seconds > limit:
        found.faults.append(f"{path} {data[:300]!r}: took {seconds:.1f} s")


def judge(found: Findings, path: str, data: bytes, status: int, answer: bytes) -> None:
    """Note what no answer may be: a 5xx beside a full queue or a time limit, or a refusal in another shape."""
    if status >= 500 and status not in (503, 504):
        found.faults.append(f"{path} {data[:600]!r}: {status} {answer[:300]!r}")
    if b'"internal_error"' in answer:
        found.faults.append(f"{path} {data[:600]!r}: {answer[-400:]!r}")
    if 400 <= status < 500 and not answer.startswith(b'{"error":{'):
        found.faults.append(f"{path} {data[:300]!r}: {status} without an error body: {answer[:200]!r}")


async def metrics(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """The gauges of the service."""
    async with session.get(f"{url}/metrics") as response:
        page = await response.text()
    return {name: float(number) for name, number in re.findall(r"^everstream_(\w+) (\S+)$", page, re.MULTILINE)}


async def settle(session: aiohttp.ClientSession, url: str, seconds: float = 30.0) -> dict[str, float]:
    """The metrics once nothing runs any more, or after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        values = await metrics(session, url)
        if not any(values[name] for name in GAUGES) or time.monotonic() > end:
            return values
        await asyncio.sleep(0.2)


async def fuzz(asked: argparse.Namespace) -> int:
    """Send everything, then look at what is left. Returns the exit code."""
    draw = random.Random(asked.seed)
    found = Findings()
    url = asked.url.rstrip("/")
    timeout = aiohttp.ClientTimeout(total=asked.limit * 2)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        seeds = [draw.getrandbits(64) for _ in range(asked.bodies)]
        warm = len(seeds) // 4
        await _all(session, url, seeds[:warm], found, asked)
        before = await settle(session, url)
        start = time.monotonic()
        await _all(session, url, seeds[warm:], found, asked)
        seconds = time.monotonic() - start
        after = await settle(session, url)
    left = {name: after[name] for name in GAUGES if after[name]}
    print(f"{asked.bodies} bodies, seed {asked.seed}, {asked.bodies / max(seconds, 1e-9) * 0.75:.0f} a second")
    print("answers:", ", ".join(f"{status} x {count}" for status, count in sorted(found.statuses.items())))
    print(f"slowest answer: {found.slowest:.2f} s; gauges after: {left or 'all zero'}")
    for name in MEMORY:
        print(f"{name}: {before[name] / 2**20:.1f} MiB after a quarter, {after[name] / 2**20:.1f} MiB at the end")
    for fault in found.faults[:20]:
        print("FAULT", fault)
    print(f"{len(found.faults)} faults")
    return 1 if found.faults or left else 0


async def _all(
    session: aiohttp.ClientSession, url: str, seeds: Sequence[int], found: Findings, asked: argparse.Namespace
) -> None:
    waiting = list(reversed(seeds))

    async def client() -> None:
        while waiting:
            await send(session, url, random.Random(waiting.pop()), found, asked.limit)

    await asyncio.gather(*(client() for _ in range(asked.clients)))


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.fuzz", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server")
    parser.add_argument("--bodies", type=int, default=5000, help="how many requests")
    parser.add_argument("--clients", type=int, default=16, help="how many at once")
    parser.add_argument("--seed", type=int, default=0, help="the same seed sends the same bodies")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds an answer may take")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Send, judge, print; returns the exit code."""
    return asyncio.run(fuzz(arguments(given)))


if __name__ == "__main__":
    sys.exit(main())
