"""The same promises with the default model and the real worker: crashes, hangs, poison, crowds, the first stream."""

import asyncio
import json
import os
import signal
import time

import psutil
import pytest

from tests.system.harness import Answer, ask, client
from tests.system.test_crash import KILLS, STREAMS, kill_at_random, plain, undisturbed
from tests.system.test_lifecycle import until

NAME = "smollm2-135m-instruct"


def bodies(count, tokens, **more):
    """Greedy streams of different lengths over different prompts."""
    subjects = ("rivers", "bread", "clocks", "whales", "paper", "trains", "moss", "glass")
    return [
        {
            "model": NAME,
            "prompt": f"{number}. A long story about {subjects[number % 8]} and what became of them. Once upon a time",
            "max_tokens": tokens + 5 * number,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
            **more,
        }
        for number in range(count)
    ]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("dtype", "tokens"), [("float32", 80), ("auto", 128)])  # the slower needs fewer for its time
async def test_kill_the_worker_twenty_times_under_sixteen_streams(real_server, dtype, tokens):
    asked = bodies(STREAMS, tokens)
    server = real_server(dtype=dtype, served_name=NAME)
    expected = await undisturbed(server, asked)
    before = server.metrics()
    await kill_at_random(server, asked, KILLS, expected, seed=11)
    values = await server.quiet()
    assert values["worker_restarts_total"] == KILLS
    assert values["requests_poisoned_total"] == 0
    assert values["streams_resumed_total"] >= 12 * KILLS
    delivered = values["generation_tokens_total"] - before["generation_tokens_total"]
    assert delivered == sum(body["max_tokens"] for body in asked)


async def test_an_endless_stream_is_taken_up_past_its_first_eviction(real_server):
    retention = {"policy": "sinks", "sink_tokens": 4, "window": 60}
    asked = bodies(3, 220, retention=retention, presence_penalty=0.6)
    server = real_server(served_name=NAME)
    expected = await undisturbed(server, asked)
    assert all(answer.usage["tokens_evicted"] > 120 for answer in expected)
    await kill_at_random(server, asked, 3, expected, seed=5, least=2)


async def test_a_stopped_worker_is_replaced(real_server):
    asked = bodies(4, 150)
    server = real_server(served_name=NAME)
    expected = await undisturbed(server, asked)
    async with client(server) as http:
        answers = [Answer() for _ in asked]
        tasks = [asyncio.create_task(ask(http, answer, **body)) for answer, body in zip(answers, asked, strict=True)]
        await until(lambda: all(answer.between for answer in answers))
        os.kill(server.workers()[0].pid, signal.SIGSTOP)
        start = time.monotonic()
        await until(lambda: server.ready_status() == 503, 6)
        assert time.monotonic() - start < 6
        await asyncio.gather(*tasks)
    assert [answer.text for answer in answers] == [answer.text for answer in expected]
    assert server.metrics()["worker_restarts_total"] == 1


async def test_a_poisonous_request_fails_alone(real_server):
    asked = bodies(6, 100)
    server = real_server(served_name=NAME, env={"EVERSTREAM_FAULT_TOKEN": "16"})
    expected = await undisturbed(server, asked)
    async with client(server) as http:
        answers = [Answer() for _ in asked]
        tasks = [asyncio.create_task(ask(http, answer, **body)) for answer, body in zip(answers, asked, strict=True)]
        await until(lambda: all(answer.between for answer in answers))
        poison = await ask(http, model=NAME, prompt=[100, 16, 200], max_tokens=5)
        await asyncio.gather(*tasks)
    message = poison.errors[0]["message"] if poison.errors else poison.body["error"]["message"]
    assert "ended two workers" in message
    assert [answer.text for answer in answers] == [answer.text for answer in expected]
    assert server.metrics()["requests_poisoned_total"] == 1
    assert server.metrics()["worker_restarts_total"] == 2


async def each_worker(http):
    """What /live says of each worker, by its number."""
    async with http.stream("GET", "/live") as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                return json.loads(line[6:])["workers"]
    raise AssertionError("the service said nothing of itself")


async def test_two_workers_share_the_streams_and_one_takes_over_the_others(real_server):
    server = real_server(workers=2, cache_bytes="48MiB", served_name=NAME)
    await until(lambda: server.metrics()["workers_ready"] == 2, 30)
    long = " ".join(f"{number} green bottles hanging on the wall," for number in range(40))
    asked = bodies(8, 60)
    async with client(server) as http:
        first = await ask(http, model=NAME, prompt=long, max_tokens=1, stream=False)
        again = [await ask(http, model=NAME, prompt=f"{long} {n}", max_tokens=1, stream=False) for n in range(4)]
        size = first.body["usage"]["prompt_tokens"]
        assert size > 256
        for answer in again:  # whoever computed the beginning gets all that begin so
            assert answer.body["usage"]["prompt_tokens_details"]["cached_tokens"] > size - 32
        expected = await asyncio.gather(*(ask(http, **body) for body in asked))
        apart = await each_worker(http)
        assert {number: stats["tokens_sampled"] > 100 for number, stats in apart.items()} == {"0": True, "1": True}
        values = server.metrics()
        assert values["kv_blocks"] == sum(stats["blocks_total"] for stats in apart.values())
        assert values["tokens_sampled_total"] == sum(stats["tokens_sampled"] for stats in apart.values())
        assert values["worker_resident_memory_bytes"] > 1.5 * max(stats["resident_bytes"] for stats in apart.values())
        answers = [Answer() for _ in asked]
        tasks = [asyncio.create_task(ask(http, answer, **body)) for answer, body in zip(answers, asked, strict=True)]
        await until(lambda: all(answer.between for answer in answers))
        os.kill(server.workers()[0].pid, signal.SIGKILL)
        await until(lambda: server.metrics()["workers_ready"] == 1, 2)
        assert server.ready_status() == 200
        resumed = server.metrics()["streams_resumed_total"]
        await asyncio.gather(*tasks)
        assert resumed == 4, "half of the streams ran on it"
        for answer, want in zip(answers, expected, strict=True):
            assert not answer.errors
            assert (answer.text, answer.finish, plain(answer.usage)) == (want.text, want.finish, plain(want.usage))
        await until(lambda: server.metrics()["workers_ready"] == 2, 20)
        values = await server.quiet()
    assert values["worker_restarts_total"] == 1
    assert values["requests_poisoned_total"] == 0
    assert values["generation_tokens_total"] == 5 + 2 * sum(body["max_tokens"] for body in asked)


async def begun(http, asked):
    """Streams begun four at a time, as many as may wait: their answers, and the tasks that take them."""
    answers, tasks = [Answer() for _ in asked], []
    for start in range(0, len(asked), 4):
        few = list(zip(answers, asked, strict=True))[start : start + 4]
        tasks += [asyncio.create_task(ask(http, answer, **body)) for answer, body in few]
        await until(lambda few=few: all(answer.between or answer.body for answer, _ in few))
    assert all(answer.between for answer in answers), answers
    return answers, tasks


@pytest.mark.parametrize("workers", [1, 2])
async def test_the_bounds_of_the_queue_are_not_for_streams_that_are_taken_up_again(real_server, workers):
    """More than may wait lose their worker at once; its successor takes them all, or its neighbour."""
    server = real_server(served_name=NAME, max_waiting=4, workers=workers, cache_bytes="64MiB")
    await until(lambda: server.metrics()["workers_ready"] == workers, 30)
    asked = bodies(12 if workers == 1 else 16, 60)
    async with client(server) as http:
        expected, tasks = await begun(http, asked)
        await asyncio.gather(*tasks)
        answers, tasks = await begun(http, asked)
        os.kill(server.workers()[0].pid, signal.SIGKILL)
        await asyncio.gather(*tasks)
    for answer, want in zip(answers, expected, strict=True):
        assert not answer.errors
        assert (answer.text, answer.finish, plain(answer.usage)) == (want.text, want.finish, plain(want.usage))
    assert server.metrics()["streams_resumed_total"] == (12 if workers == 1 else 8)


async def test_a_crowd_that_gives_up(real_server):
    server = real_server(served_name=NAME)
    prompt = [1000 + number % 500 for number in range(8000)]
    async with client(server) as http:
        crowd = [{"model": NAME, "prompt": [*prompt, number], "max_tokens": 20} for number in range(200)]
        tasks = [asyncio.create_task(ask(http, **body)) for body in crowd]
        await asyncio.sleep(0.5)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        start = time.monotonic()
        answer = await ask(http, model=NAME, prompt="Ten tokens of prompt are quite enough here", max_tokens=3)
        assert answer.finish == ["length"]
        assert time.monotonic() - start < 5
        values = await server.quiet()
    assert values["prompt_tokens_computed_total"] <= 4 * 512, "steps that were begun before it was heard who has left"


async def test_the_worker_ends_with_a_killed_front_end(real_server):
    server = real_server(served_name=NAME)
    workers = server.workers()
    async with client(server) as http:
        task = asyncio.create_task(ask(http, **bodies(1, 500)[0]))
        await until(lambda: server.metrics()["num_requests_running"] == 1)
        server.process.kill()
        server.process.wait()
        _, alive = await asyncio.to_thread(psutil.wait_procs, workers, 2)
        assert not alive
        task.cancel()
        await asyncio.wait([task])
