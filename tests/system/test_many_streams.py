"""Thirty-two streams at once through the real openai client, some given up half way: all end, nothing leaks."""

import asyncio
import random

import openai
import pytest

from tests.system.harness import client

NAME = "smollm2-135m-instruct"
COUNT = 32


async def stream(
    server: openai.AsyncOpenAI, length: int, tokens: int, leave_after: int | None
) -> tuple[int, str | None]:
    """(chunks with text, finish_reason) of one stream; None where it was given up."""
    prompt = [1000 + (length * 7 + place) % 20_000 for place in range(length)]
    answer = await server.completions.create(
        model=NAME, prompt=prompt, max_tokens=tokens, stream=True, extra_body={"ignore_eos": True}
    )
    seen = 0
    async for chunk in answer:
        if chunk.choices and chunk.choices[0].finish_reason:
            return seen, chunk.choices[0].finish_reason
        seen += 1
        if leave_after is not None and seen >= leave_after:
            await answer.close()
            return seen, None
    return seen, "cut"


@pytest.mark.timeout(300)
async def test_thirty_two_streams_end_properly_and_leak_nothing(real_server):
    server = real_server(served_name=NAME)
    rng = random.Random(3)
    lengths = [1, 2000, *(int(2000 ** rng.random()) for _ in range(COUNT - 2))]
    tokens = [rng.randint(20, 120) for _ in lengths]
    leaves = [tokens[n] // 4 if n % 4 == 3 else None for n in range(COUNT)]
    before = server.metrics()
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=100
    ) as openai_client:
        jobs = zip(lengths, tokens, leaves, strict=True)
        ends = await asyncio.gather(*(stream(openai_client, *job) for job in jobs))
    for leave, (_, reason) in zip(leaves, ends, strict=True):
        assert reason == (None if leave is not None else "length")
    await server.quiet()
    async with client(server) as http:  # the next step's message brings the count of the checks that ran when idle
        await http.post("/v1/completions", json={"model": NAME, "prompt": [1, 2, 3], "max_tokens": 1})
    after = await server.quiet()
    assert after["kv_pool_checks_total"] > before.get("kv_pool_checks_total", 0)
    assert after["worker_restarts_total"] == 0, "a pool that does not add up ends the worker"
    counts = {reason: after[f'request_success_total{{finished_reason="{reason}"}}'] for reason in ("length", "abort")}
    assert counts == {"length": 24 + 1, "abort": 8}
