"""Lists of prompts over a worker process: their head comes after a step, and no client is blamed for its server."""

import asyncio
import time

from tests.system.harness import ask, client


async def test_the_head_of_a_list_comes_after_a_step(fake_server):
    server = fake_server({"delay": 0.1})
    async with client(server) as http:
        beside = asyncio.create_task(ask(http, prompt="beside", max_tokens=2000))
        await asyncio.sleep(0.3)
        start = time.monotonic()
        body = {"model": "fake", "prompt": [f"p{number}" for number in range(60)], "max_tokens": 5, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            head = time.monotonic() - start
            assert response.status_code == 200
            await response.aread()
        assert head < 2.0, "one by one they took 60 steps of 0.1 s"
        beside.cancel()
        await asyncio.gather(beside, return_exceptions=True)


async def test_a_list_longer_than_the_queue_is_taken_whole(fake_server):
    server = fake_server({"delay": 0.01}, max_waiting=4, max_waiting_tokens=16, max_sequences=8)
    async with client(server) as http:
        answer = await ask(http, prompt=[f"prompt {number}" for number in range(40)], max_tokens=5)
    assert (answer.finish, answer.errors) == (["length"] * 40, [])


async def test_a_small_buffer_is_for_slow_clients_not_for_long_lists(fake_server):
    server = fake_server({"delay": 0.02}, stream_buffer=64)
    body = {"prompt": [f"p{number}" for number in range(120)], "max_tokens": 100}
    async with client(server) as http:
        streamed = await ask(http, **body)
        whole = await ask(http, **body, stream=False)
    assert (streamed.finish, streamed.errors) == (["length"] * 120, [])
    assert [choice["finish_reason"] for choice in whole.body["choices"]] == ["length"] * 120
