"""Streams over a pretend worker: admission, deadlines, stops, slow readers, one last word each."""

import asyncio
import time

import pytest

from app.generation import HEARTBEAT, Admission, Broken, Refused
from model.protocol import Failed, Rejected, Retention
from tests.stream_bench import Bench, ask, collect, finish, text_of
from tests.tiny_text import byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


async def test_a_stream_runs_to_its_length(tokenizer):
    bench = Bench(tokenizer)
    async with bench.running():
        text, reason, usage = await text_of(bench.service, ask(max_tokens=20))
    assert len(text) == 20
    assert reason == "length"
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 20)
    assert bench.value("request_success_total", finished_reason="length") == 1
    assert bench.value("generation_tokens_total") == 20
    assert bench.value("prompt_tokens_total") == 3
    assert bench.value("time_to_first_token_seconds_count") == 1
    assert bench.value("request_generation_tokens_sum") == 20
    assert bench.service.num_open == 0


async def test_choices_end_each_by_themselves(tokenizer):
    bench = Bench(tokenizer)
    async with bench.running():
        deltas, usage = await collect(bench.service, ask(max_tokens=9, n=3, seed=5))
    for choice in range(3):
        mine = [d for d in deltas if d.choice == choice]
        assert [d.finish_reason for d in mine if d.finish_reason] == ["length"]
        assert mine[-1].finish_reason == "length"
    assert [c.completion_tokens for c in usage.choices] == [9, 9, 9]
    assert len({"".join(d.text for d in deltas if d.choice == c) for c in range(3)}) == 3
    assert bench.value("request_success_total", finished_reason="length") == 1, "once a request, not once a choice"


async def test_stop_string_cancels_and_counts_to_the_completing_token(tokenizer):
    bench = Bench(tokenizer, script=tuple(b"one two STOP three four"))
    async with bench.running():
        text, reason, usage = await text_of(bench.service, ask(max_tokens=100, stop=(" STOP",)))
        await asyncio.sleep(0.01)
    assert (text, reason) == ("one two", "stop")
    assert usage.completion_tokens == len("one two STOP")
    assert bench.pool.cancelled == [("r", 0)]
    assert not bench.pool.engine.busy
    assert bench.value("generation_tokens_total") == len("one two STOP")


async def test_leaving_cancels_and_counts_as_abort(tokenizer):
    bench = Bench(tokenizer)
    async with bench.running():
        async with bench.service.open(ask(max_tokens=None, retention=Retention("sinks"))) as stream:
            async for _ in stream:
                break
        assert bench.pool.cancelled == [("r", -1)]
        await asyncio.sleep(0.01)
        assert not bench.pool.engine.busy
    assert bench.value("request_success_total", finished_reason="abort") == 1


async def test_cancelled_while_waiting_for_acceptance(tokenizer):
    bench = Bench(tokenizer)
    bench.pool.place = lambda submit, inbox: None  # a worker that does not answer
    task = asyncio.create_task(collect(bench.service, ask()))
    await asyncio.sleep(0.01)
    assert bench.service.num_waiting == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.service.num_open == 0
    assert bench.value("request_success_total", finished_reason="abort") == 1
    assert bench.value("request_queue_time_seconds_count") == 1


async def test_given_up_in_the_queue_before_a_worker_accepted(tokenizer):
    bench = Bench(tokenizer, Admission(queue_timeout=0.05))
    bench.pool.place = lambda submit, inbox: None
    with pytest.raises(Refused, match="in the queue") as caught:
        await collect(bench.service, ask())
    assert (caught.value.status, caught.value.code) == (503, "queue_timeout")
    assert caught.value.retry_after >= 1
    assert bench.value("admission_rejections_total", reason="queue_timeout") == 1
    assert bench.value("request_success_total", finished_reason="error") == 0


async def test_a_failed_request_ends_with_its_message(tokenizer):
    bench = Bench(tokenizer)
    async with bench.running(), bench.service.open(ask(max_tokens=500)) as stream:
        with pytest.raises(Broken, match="row 3 is not finite") as caught:
            await finish(stream, lambda: bench.pool.inboxes["r"].put(Failed("r", 1, "row 3 is not finite")))
    assert (caught.value.status, caught.value.code) == (500, "internal_error")


async def test_a_request_that_fails_by_its_own_fault_is_a_400(tokenizer):
    bench = Bench(tokenizer)
    failed = Failed("r", 1, "no token is left", "no_token_left")
    async with bench.running(), bench.service.open(ask(max_tokens=500)) as stream:
        with pytest.raises(Broken, match="no token is left") as caught:
            await finish(stream, lambda: bench.pool.inboxes["r"].put(failed))
    assert (caught.value.status, caught.value.code) == (400, "no_token_left")


@pytest.mark.parametrize(("reason", "status", "retry"), [("no_token_left", 400, None), ("", 503, 1)])
async def test_a_request_that_fails_before_its_stream_begins(tokenizer, reason, status, retry):
    bench = Bench(tokenizer)
    bench.pool.place = lambda submit, inbox: inbox.put(Failed("r", 1, "no token is left", reason))
    with pytest.raises(Refused, match="no token is left") as caught:
        await collect(bench.service, ask())
    assert (caught.value.status, caught.value.retry_after) == (status, retry)
    assert caught.value.code == (reason or "internal_error")


@pytest.mark.parametrize(
    ("reason", "status", "retry"), [("too_long", 400, False), ("queue_full", 429, True), ("draining", 503, True)]
)
async def test_rejections_become_refusals(tokenizer, reason, status, retry):
    bench = Bench(tokenizer, reject=reason)
    with pytest.raises(Refused) as caught:
        await collect(bench.service, ask())
    assert caught.value.status == status
    assert (caught.value.retry_after is not None) == retry
    assert caught.value.param == "prompt"
    assert bench.value("admission_rejections_total", reason=reason) == 1
    assert bench.value("request_success_total", finished_reason="abort") == 0
    assert bench.service.num_open == 0


async def test_the_queue_is_bounded_by_count_and_tokens(tokenizer):
    bench = Bench(tokenizer, Admission(max_waiting=3, max_waiting_tokens=100))
    bench.pool.paused = True
    async with bench.running():
        tasks = [asyncio.create_task(collect(bench.service, ask(f"r{i}", max_tokens=2))) for i in range(3)]
        await asyncio.sleep(0.01)
        with pytest.raises(Refused, match="3 requests are waiting") as caught:
            await collect(bench.service, ask("late"))
        assert (caught.value.status, caught.value.code) == (429, "queue_full")
        assert caught.value.retry_after >= 1
        for task in tasks[1:]:
            task.cancel()
        await asyncio.sleep(0.01)
        with pytest.raises(Refused) as caught:
            await collect(bench.service, ask("long", prompt=range(98)))
        assert caught.value.code == "queue_tokens"
        bench.pool.paused = False
        bench.pool.wake.set()
        await tasks[0]
        await collect(bench.service, ask("long", prompt=range(98), max_tokens=1))
    assert bench.value("admission_rejections_total", reason="queue_full") == 1
    assert bench.value("admission_rejections_total", reason="queue_tokens") == 1


async def test_deadlines(tokenizer):
    bench = Bench(tokenizer, Admission(queue_timeout=0.05))
    bench.pool.paused = True
    async with bench.running(), bench.service.open(ask("a")) as stream:
        with pytest.raises(Broken, match="in the queue") as caught:
            await anext(stream)
        assert (caught.value.code, caught.value.status) == ("queue_timeout", 503)
        assert caught.value.retry_after >= 1
    assert bench.value("admission_rejections_total", reason="queue_timeout") == 1
    assert bench.value("request_success_total", finished_reason="error") == 1
    assert bench.value("request_queue_time_seconds_sum") == pytest.approx(0.05, abs=0.04)
    bench = Bench(tokenizer, Admission(request_timeout=9.0), delay=0.01)
    async with bench.running():
        async with bench.service.open(ask("b", max_tokens=10_000, timeout=0.1)) as stream:
            with pytest.raises(Broken, match=r"0\.1 s") as caught:
                await finish(stream)
            assert (caught.value.code, caught.value.status) == ("timeout", 504)
        await asyncio.sleep(0.05)
        assert not bench.pool.engine.busy


async def test_a_silent_stream_gets_heartbeats(tokenizer):
    bench = Bench(tokenizer, Admission(silence=0.05))
    bench.pool.paused = True
    async with bench.running(), bench.service.open(ask(max_tokens=2)) as stream:
        stream.reader.last_write = time.monotonic()
        assert await anext(stream) is HEARTBEAT
        bench.lose("r")
        assert await anext(stream) is HEARTBEAT
        bench.pool.paused = False
        bench.pool.wake.set()
        rest = [delta async for delta in stream]
    assert sum(len(d.tokens) for d in rest if d.choice >= 0) == 2


async def test_a_stream_opens_after_silence_though_no_worker_has_accepted_it(tokenizer):
    bench = Bench(tokenizer, Admission(silence=0.1))
    bench.pool.place = lambda submit, inbox: None
    for reason, status, retry in (("queue_full", 429, 1), ("too_long", 400, None)):
        async with bench.running(), bench.service.open(ask()) as stream:
            stream.reader.last_write = time.monotonic()
            assert await anext(stream) is HEARTBEAT
            stream.inbox.put(Rejected("r", 1, reason, "no room"))
            with pytest.raises(Broken, match=r"^no room$") as caught:
                await anext(stream)
        assert (caught.value.status, caught.value.retry_after) == (status, retry)


async def test_a_slow_reader_is_ended_and_memory_stays_bounded(tokenizer):
    bench = Bench(tokenizer, Admission(stream_buffer=64))
    async with bench.running(), bench.service.open(ask(max_tokens=3000)) as stream:
        await anext(stream)
        stream.reader.behind = True
        for _ in range(400):
            await asyncio.sleep(0)
        assert len(bench.pool.inboxes["r"]._events) <= 65
        with pytest.raises(Broken, match="pile up") as caught:
            await finish(stream)
    assert caught.value.code == "slow_reader"


async def test_what_the_server_has_not_asked_for_yet_is_not_the_clients_fault(tokenizer):
    bench = Bench(tokenizer, Admission(stream_buffer=64))
    async with bench.running(), bench.service.open(ask(max_tokens=3000)) as stream:
        await anext(stream)
        for _ in range(400):
            await asyncio.sleep(0)
        await finish(stream)
        assert stream.usage.completion_tokens == 3000


async def test_draining_refuses_then_ends_what_is_late(tokenizer):
    bench = Bench(tokenizer, delay=0.005)
    async with bench.running():
        short = asyncio.create_task(collect(bench.service, ask("short", max_tokens=10)))
        late = asyncio.create_task(collect(bench.service, ask("late", max_tokens=100_000)))
        await asyncio.sleep(0.02)
        drain = asyncio.create_task(bench.service.drain(0.3))
        await asyncio.sleep(0)
        with pytest.raises(Refused, match="shutting down") as caught:
            await collect(bench.service, ask("new"))
        assert caught.value.status == 503
        assert (await short)[0][-1].finish_reason == "length"
        with pytest.raises(Broken, match="grace time"):
            await late
        await drain
    assert bench.service.num_open == 0


async def test_what_comes_together_with_the_acceptance_is_not_lost(tokenizer):
    bench = Bench(tokenizer)
    place = bench.pool.place

    def place_and_run(submit, inbox):
        place(submit, inbox)
        while bench.pool.engine.busy:
            bench.pool.step()

    bench.pool.place = place_and_run
    text, reason, usage = await text_of(bench.service, ask(max_tokens=20))
    assert len(text) == usage.completion_tokens == 20
    assert reason == "length"


async def test_a_long_scored_prompt_is_no_slow_reader(tokenizer):
    bench = Bench(tokenizer, Admission(stream_buffer=64))
    generation = ask(prompt=[65] * 500, max_tokens=2, prompt_logprobs=1)
    async with bench.running(), bench.service.open(generation) as stream:
        await finish(stream)
        assert len(stream.prompt_logprobs) == 499
