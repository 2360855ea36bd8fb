"""Start, stop, leave, overload: rows 24 to 27 of the list of requests that broke other servers, and their kin."""

import asyncio
import os
import re
import signal
import time

import httpx
import psutil
import pytest

from tests.system.harness import Answer, ask, client


async def until(condition, seconds=10.0):
    """Wait for something to become true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.01)


async def test_leaving_in_mid_stream_cancels_within_two_steps(fake_server):
    server = fake_server({"delay": 0.05})
    async with client(server) as http:
        answer = Answer()
        task = asyncio.create_task(ask(http, answer, prompt="x", max_tokens=3000))
        await until(lambda: len(answer.pieces) > 3)
        task.cancel()
        await asyncio.wait([task])
        steps = server.metrics()["engine_steps_total"]
        values = await server.quiet()
    assert values["engine_steps_total"] <= steps + 4, "two steps, and what ran while the test looked"
    assert values['request_success_total{finished_reason="abort"}'] == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_while_queued_cancels(fake_server, stream):
    server = fake_server({"delay": 0.02}, max_sequences=1)
    async with client(server) as http:
        first = Answer()
        busy = asyncio.create_task(ask(http, first, prompt="x", max_tokens=1500))
        await until(lambda: first.pieces)
        queued = [asyncio.create_task(ask(http, prompt="y", max_tokens=5, stream=stream)) for _ in range(3)]
        await until(lambda: server.metrics()["streams_queued"] == 3)
        for task in queued:
            task.cancel()
        await asyncio.wait(queued)
        await until(lambda: server.metrics()["streams_open"] == 1)
        values = server.metrics()
        assert values['request_success_total{finished_reason="abort"}'] == 3
        assert not busy.done()
        busy.cancel()
        await server.quiet()


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_during_prefill_cancels(fake_server, stream):
    server = fake_server({"delay": 0.05}, token_budget=16, max_body_bytes=1 << 20)
    async with client(server) as http:
        task = asyncio.create_task(ask(http, prompt="p" * 3000, max_tokens=5, stream=stream))
        await until(lambda: server.metrics()["prompt_tokens_computed_total"] > 16)
        task.cancel()
        values = await server.quiet(2.0)
    assert values["prompt_tokens_computed_total"] < 1000
    assert values["generation_tokens_total"] == 0


async def test_leaving_without_stream_cancels(fake_server):
    server = fake_server({"delay": 0.02})
    async with client(server) as http:
        task = asyncio.create_task(ask(http, prompt="x", max_tokens=3000, stream=False))
        await until(lambda: server.metrics()["num_requests_running"] == 1)
        task.cancel()
        values = await server.quiet(2.0)
    assert values['request_success_total{finished_reason="abort"}'] == 1
    assert values['http_requests_total{method="POST",route="/v1/completions",status="499"}'] == 1


async def test_a_crowd_that_gives_up_does_not_block_the_next(fake_server):
    server = fake_server({"delay": 0.01, "context": 20_000}, max_waiting_tokens=4 << 20)

    async def impatient(http):
        try:
            await ask(http, prompt=[65] * 10_000, max_tokens=50, timeout=None)
        except httpx.HTTPError:
            return

    async with client(server) as http:
        tasks = [asyncio.create_task(impatient(http)) for _ in range(200)]
        await asyncio.sleep(0.5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        start = time.monotonic()
        answer = await ask(http, prompt="short one!", max_tokens=3)
        assert answer.finish == ["length"]
        assert time.monotonic() - start < 5
        await server.quiet()


async def test_ten_times_more_than_the_queue_holds(fake_server):
    server = fake_server({"delay": 0.002}, max_waiting=20, max_sequences=8)
    async with client(server) as http:
        before = server.memory()
        begun = [Answer() for _ in range(8)]
        tasks = [asyncio.create_task(ask(http, answer, prompt="x", max_tokens=30)) for answer in begun]
        while not all(answer.pieces for answer in begun):  # the others may all come before the next step
            await asyncio.sleep(0.001)
        answers = await asyncio.gather(*tasks, *(ask(http, prompt="x", max_tokens=30) for _ in range(192)))
        values = await server.quiet()
    refused = [answer for answer in answers if answer.status == 429]
    served = [answer for answer in answers if answer.status == 200]
    assert len(refused) + len(served) == 200
    assert len(refused) > 50
    assert len(served) >= 28
    assert all(1 <= int(answer.headers["retry-after"]) <= 60 for answer in refused)
    assert all("queue is full" in answer.body["error"]["message"] for answer in refused)
    assert all(answer.finish == ["length"] and answer.done for answer in served)
    assert values['admission_rejections_total{reason="queue_full"}'] == len(refused)
    assert values["generation_tokens_total"] == 30 * len(served)
    assert server.memory() - before < 40 << 20


async def test_sigterm_lets_a_long_stream_end(fake_server):
    server = fake_server({"delay": 0.01}, grace=20)
    async with client(server) as http:
        answer = Answer()
        task = asyncio.create_task(ask(http, answer, prompt="x", max_tokens=200))
        await until(lambda: answer.pieces)
        server.terminate()
        await until(lambda: server.ready_status() == 503, 3)
        assert httpx.get(f"{server.url}/health/live").status_code == 200
        late = await ask(http, prompt="x")
        assert late.status == 503
        assert "shutting down" in late.body["error"]["message"]
        await task
    assert answer.finish == ["length"]
    assert answer.done
    assert server.ends() == 0
    assert "Traceback" not in server.log.read_text()


async def test_what_is_late_gets_one_clear_error(fake_server):
    server = fake_server({"delay": 0.01}, grace=0.5)
    async with client(server) as http:
        answer = Answer()
        task = asyncio.create_task(ask(http, answer, prompt="x", max_tokens=4000))
        await until(lambda: answer.pieces)
        start = time.monotonic()
        server.terminate()
        await task
    assert len(answer.errors) == 1
    assert "grace time of 0.5 s" in answer.errors[0]["message"]
    assert not answer.finish
    assert server.ends() == 0
    assert time.monotonic() - start < 8
    assert "Traceback" not in server.log.read_text()


async def test_a_collector_that_refuses_does_not_hold_up_the_end(fake_server, unused_tcp_port):
    pytest.importorskip("opentelemetry.sdk", reason="traces are an optional extra")
    server = fake_server({}, otlp_endpoint=f"http://127.0.0.1:{unused_tcp_port}")
    async with client(server) as http:
        assert (await ask(http, prompt="x", max_tokens=3)).finish == ["length"]
    start = time.monotonic()
    server.terminate()
    assert server.ends() == 0
    assert time.monotonic() - start < 5


async def test_a_second_signal_ends_at_once(fake_server):
    server = fake_server({"delay": 0.01}, grace=60)
    async with client(server) as http:
        answer = Answer()
        task = asyncio.create_task(ask(http, answer, prompt="x", max_tokens=4000))
        await until(lambda: answer.pieces)
        workers = server.workers()
        server.terminate()
        await until(lambda: server.ready_status() == 503, 3)
        start = time.monotonic()
        server.terminate(signal.SIGINT)
        assert server.ends(2) != 0
        assert time.monotonic() - start < 1
        with pytest.raises(httpx.HTTPError):
            await task
    await until(lambda: not any(worker.is_running() and worker.status() != "zombie" for worker in workers), 2)


async def test_the_worker_ends_when_the_front_end_is_killed(fake_server):
    server = fake_server({"delay": 0.01})
    workers = server.workers()
    assert len(workers) == 1
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()
    _, alive = psutil.wait_procs(workers, timeout=2)
    assert not alive


def test_readiness_is_false_while_loading(fake_server):
    server = fake_server({"start_seconds": 2.0}, ready=0)
    seen = set()
    end = time.monotonic() + 15
    while 200 not in seen and time.monotonic() < end:
        seen.add(server.ready_status())
        time.sleep(0.05)
    assert {503, 200} <= seen


@pytest.mark.parametrize(
    ("behaviour", "settings", "sentence"),
    [
        ({"fail": "The model file x.gguf is cut short; pull it again."}, {}, "x.gguf is cut short; pull it again."),
        ({"die_at": 0, "fail": ""}, {"host": "0.0.0.0"}, "--insecure"),
        ({}, {"port": 1, "host": "127.0.0.77"}, None),
    ],
)
def test_a_start_that_cannot_be_is_one_line(fake_server, behaviour, settings, sentence):
    if sentence is None:
        settings["port"], sentence = fake_server({}).port, "choose another --port"
        settings.pop("host")
    server = fake_server(behaviour, ready=0, **settings)
    assert server.ends(20) not in (0, None)
    lines = server.log.read_text().strip().splitlines()
    assert len(lines) == 1, lines
    assert sentence in lines[0]
    assert re.match("error: ", lines[0])


async def test_requests_that_can_never_fit_do_not_block_those_behind(fake_server):
    server = fake_server({"context": 4096}, num_blocks=32)
    async with client(server) as http:
        big = await ask(http, prompt="x" * 1000, max_tokens=5)
        assert big.status == 400
        assert "1000" in big.body["error"]["message"]
        assert "512" in big.body["error"]["message"]
        assert (await ask(http, prompt="small", max_tokens=5)).finish == ["length"]
