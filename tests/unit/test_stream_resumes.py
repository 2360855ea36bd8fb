"""Streams whose worker dies: taken up without a lost or repeated token, or ended for a reason."""

import asyncio
import socket

import pytest

from app.generation import Admission, Broken, Refused, Stream
from app.metrics import Metrics
from app.supervisor import Supervisor
from app.worker_client import Inbox, Lost, Reader, WorkerClient
from model.config import EngineConfig
from model.protocol import Rejected, Retention
from model.wire import AsyncConnection
from tests.fake_worker import FakePool
from tests.stream_bench import Bench, ask, collect, finish, text_of
from tests.tiny_text import byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


async def test_a_dead_worker_is_not_noticed_in_the_text(tokenizer):
    undisturbed = Bench(tokenizer)
    generation = ask(max_tokens=60, n=2, seed=9)
    async with undisturbed.running():
        expected, _ = await collect(undisturbed.service, generation)
    bench = Bench(tokenizer)
    async with bench.running():
        deltas = []
        async with bench.service.open(generation) as stream:
            async for delta in stream:
                deltas.append(delta)
                if len(deltas) in (5, 20, 21, 60):
                    bench.lose("r")
            usage = stream.usage
    for choice in range(2):
        assert "".join(d.text for d in deltas if d.choice == choice) == "".join(
            d.text for d in expected if d.choice == choice
        )
    assert [c.completion_tokens for c in usage.choices] == [60, 60]
    assert [s.attempt for s in bench.pool.submitted] == [1, 2, 3, 4, 5]
    assert bench.value("streams_resumed_total") == 4
    assert bench.value("request_success_total", finished_reason="length") == 1
    assert bench.value("time_to_first_token_seconds_count") == 1


async def test_an_endless_stream_resumes_from_bounded_memory(tokenizer):
    retention = Retention("sinks", sink_tokens=4, window=16)
    generation = ask(prompt=(7,), max_tokens=400, retention=retention)
    undisturbed = Bench(tokenizer)
    async with undisturbed.running():
        expected, *_ = await text_of(undisturbed.service, generation)
    bench = Bench(tokenizer)
    async with bench.running():
        text = ""
        async with bench.service.open(generation) as stream:
            async for delta in stream:
                text += delta.text
                if len(text) in (10, 200, 390) and delta.text:
                    bench.lose("r")
            assert stream.usage.tokens_evicted > 300
    assert text == expected
    resume = bench.pool.submitted[-1].resume[0]
    assert len(resume.tail) == 1 + 2 * 15 + 16
    assert resume.tail_start + len(resume.tail) == 1 + 390
    assert len(resume.head) == 3 + 16
    assert bench.pool.submitted[-1].prompt == (7,)


async def test_messages_of_an_older_attempt_are_dropped(tokenizer):
    bench = Bench(tokenizer)
    async with bench.running(), bench.service.open(ask(max_tokens=30)) as stream:
        text = ""
        async for delta in stream:
            text += delta.text
            if len(text) == 5:
                inbox = bench.pool.inboxes["r"]
                inbox.put(Lost(True))  # the old sequence goes on in the pool beside the new one
        assert len(text) == 30
        assert stream.usage.completion_tokens == 30


async def test_time_in_the_queue_is_counted_over_all_attempts(tokenizer):
    bench = Bench(tokenizer)
    bench.pool.paused = True
    async with bench.running():
        task = asyncio.create_task(collect(bench.service, ask(max_tokens=2)))
        await asyncio.sleep(0.2)
        bench.lose("r", in_step=False)
        await asyncio.sleep(0.1)
        bench.pool.paused = False
        bench.pool.wake.set()
        await task
    queued = bench.value("request_queue_time_seconds_sum")
    assert queued >= 0.3
    whole = bench.value("time_to_first_token_seconds_sum")
    assert queued + bench.value("request_prefill_time_seconds_sum") == pytest.approx(whole)


async def test_poison_fails_after_dying_alone(tokenizer, caplog):
    bench = Bench(tokenizer)
    bench.pool.paused = True
    task = asyncio.create_task(collect(bench.service, ask()))
    for alone in (False, True):
        await asyncio.sleep(0.01)
        assert bench.pool.submitted[-1].alone == alone
        bench.lose("r")
    with pytest.raises(Broken, match="ended two workers"):
        await asyncio.wait_for(task, 5)
    assert bench.value("requests_poisoned_total") == 1
    assert len(bench.pool.submitted) == 2
    poisoned, broken = (record for record in caplog.records if record.name.startswith("everstream"))
    assert (poisoned.message, poisoned.generation, poisoned.workers_ended) == ("request poisoned", "r", 2)
    assert (broken.message, broken.error) == ("stream broken", "poisoned")


async def test_poison_before_its_worker_accepted_is_no_invitation_to_come_again(tokenizer):
    bench = Bench(tokenizer)
    bench.pool.place = lambda submit, inbox: inbox.put(Lost(True))
    with pytest.raises(Refused, match="ended two workers") as caught:
        await collect(bench.service, ask())
    assert (caught.value.status, caught.value.code, caught.value.retry_after) == (500, "poisoned", None)


async def test_a_token_clears_the_strike_and_a_bystander_gets_none(tokenizer):
    bench = Bench(tokenizer)
    async with bench.running(), bench.service.open(ask(max_tokens=200)) as stream:
        seen = 0
        async for delta in stream:
            seen += len(delta.tokens)
            if seen % 10 == 1 and delta.tokens:
                bench.lose("r")
                await asyncio.sleep(0)
    assert all(not submit.alone for submit in bench.pool.submitted)
    bench = Bench(tokenizer)
    bench.pool.paused = True
    async with bench.running():
        task = asyncio.create_task(collect(bench.service, ask(max_tokens=3)))
        for _ in range(4):
            await asyncio.sleep(0.01)
            bench.lose("r", in_step=False)
        await asyncio.sleep(0.01)
        assert not bench.pool.submitted[-1].alone
        bench.pool.paused = False
        bench.pool.wake.set()
        await task
    assert bench.value("requests_poisoned_total") == 0


async def test_without_resume_each_stream_gets_one_clear_error(tokenizer):
    bench = Bench(tokenizer, Admission(resume=False))
    async with bench.running(), bench.service.open(ask(max_tokens=50)) as stream:
        with pytest.raises(Broken, match="send it again") as caught:
            await finish(stream, lambda: bench.lose("r") if "r" in bench.pool.inboxes else None)
    assert (caught.value.code, caught.value.status) == ("worker_lost", 503)
    assert bench.value("request_success_total", finished_reason="error") == 1


async def test_a_worker_may_refuse_after_it_accepted(tokenizer):
    bench = Bench(tokenizer)
    bench.pool.paused = True
    async with bench.running(), bench.service.open(ask()) as stream:
        bench.pool.inboxes["r"].put(Rejected("r", 1, "queue_timeout", "it waited 3 s in the queue"))
        with pytest.raises(Broken, match=r"^it waited 3 s") as caught:
            await anext(stream)
        assert (caught.value.code, caught.value.status) == ("queue_timeout", 503)
    async with bench.running(), bench.service.open(ask()) as stream:
        bench.lose("r")
        await asyncio.sleep(0.01)
        reader = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.01)
        bench.pool.inboxes["r"].put(Rejected("r", 2, "cache_too_small", "the cache holds 10 tokens"))
        with pytest.raises(Broken, match="taken up again: the cache holds"):
            await reader


async def test_prompt_logprobs_are_whole_after_a_resume(tokenizer):
    bench = Bench(tokenizer)
    generation = ask(prompt=range(40), max_tokens=30, logprobs=2, prompt_logprobs=1)
    async with bench.running(), bench.service.open(generation) as stream:
        tokens = []
        async for delta in stream:
            tokens += delta.tokens
            if len(tokens) == 10:
                bench.lose("r")
        assert len(stream.prompt_logprobs) == 39
    assert all(token.logprob is not None and len(token.logprob.top) == 2 for token in tokens)
    offset = 0
    for token in tokens:
        assert token.text_offset == offset
        offset += len(token.text)
    assert bench.pool.submitted[-1].params.prompt_logprobs is None


async def test_a_request_placed_while_the_worker_has_just_died_waits_for_the_next_one(tokenizer):
    """Two requests in the turn of the loop in which its connection breaks: neither may come back to it for ever."""
    mine, workers = socket.socketpair()
    connection = AsyncConnection(*await asyncio.open_unix_connection(sock=mine))
    supervisor = Supervisor([EngineConfig(model="m", name="m", socket="")], Metrics())
    ready = FakePool().ready
    client = supervisor._slots[0].client = WorkerClient(0, connection, ready, lambda *told: None)
    pump = asyncio.create_task(client.run())
    await asyncio.sleep(0.01)
    workers.close()
    made = [(ask(name), tokenizer, ready, Inbox(10, Reader())) for name in ("one", "two")]
    streams = [Stream(*each, supervisor.place, Metrics()) for each in made]
    for stream in streams:
        stream.place()
    starting = [asyncio.create_task(stream.accepted()) for stream in streams]
    await asyncio.sleep(0.05)
    assert {submit.request for submit, _ in supervisor._parked} == {"one", "two"}
    assert max(submit.attempt for submit, _ in supervisor._parked) > 1
    for task in (*starting, pump):
        task.cancel()
    await asyncio.gather(*starting, pump, return_exceptions=True)
