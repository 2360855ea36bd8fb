"""Requests with a list of prompts: placed at once, open all or none, one reader for all their streams."""

import asyncio
import time

import pytest

from app.generation import HEARTBEAT, Admission, Refused
from model.protocol import Accepted, Rejected
from tests.stream_bench import Bench, ask, collect
from tests.tiny_text import byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


def asked(count):
    return [ask(f"r{number}", max_tokens=2) for number in range(count)]


async def opened(bench, count):
    async with bench.service.open_all(asked(count)) as streams:
        return [[delta async for delta in stream] for stream in streams]


def unanswering(bench):
    """A pool that keeps what is placed until the test answers it."""
    placed = []
    bench.pool.place = lambda submit, inbox: placed.append((submit, inbox))
    return placed


async def test_all_prompts_are_placed_before_the_first_is_accepted(tokenizer):
    bench = Bench(tokenizer)
    placed = unanswering(bench)
    task = asyncio.create_task(opened(bench, 5))
    await asyncio.sleep(0.01)
    assert [submit.request for submit, _ in placed] == ["r0", "r1", "r2", "r3", "r4"]
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.service.num_open == 0


async def test_a_refusal_of_one_ends_them_all_before_any_stream(tokenizer):
    bench = Bench(tokenizer)
    placed = unanswering(bench)
    task = asyncio.create_task(opened(bench, 4))
    await asyncio.sleep(0.01)
    for submit, inbox in placed:
        third = submit.request == "r2"
        answer = Rejected(submit.request, 1, "queue_full", "no room") if third else Accepted(submit.request, 1)
        inbox.put(answer)
    with pytest.raises(Refused, match="no room"):
        await task
    assert all(inbox.closed for _, inbox in placed)
    assert bench.service.num_open == 0
    assert bench.value("admission_rejections_total", reason="queue_full") == 1
    assert bench.value("request_success_total", finished_reason="abort") == 0


async def test_the_prompts_of_one_request_do_not_fill_the_queue_for_each_other(tokenizer):
    bench = Bench(tokenizer, Admission(max_waiting=3, max_waiting_tokens=10))
    bench.pool.paused = True
    async with bench.running():
        task = asyncio.create_task(opened(bench, 8))
        await asyncio.sleep(0.01)
        with pytest.raises(Refused, match="8 requests are waiting"):
            await collect(bench.service, ask("late"))
        bench.pool.paused = False
        bench.pool.wake.set()
        assert [deltas[-1].finish_reason for deltas in await task] == ["length"] * 8


async def test_one_heartbeat_goes_to_a_reader_and_none_while_something_is_written(tokenizer):
    bench = Bench(tokenizer, Admission(silence=0.1))
    bench.pool.paused = True
    async with bench.running(), bench.service.open_all(asked(5)) as streams:
        streams[0].reader.last_write = time.monotonic()
        await asyncio.sleep(0.06)
        streams[3].reader.last_write = time.monotonic()
        await asyncio.sleep(0.06)
        assert not any(stream.inbox._events for stream in streams)
        await asyncio.sleep(0.1)
        assert [bool(stream.inbox._events) for stream in streams] == [True, False, False, False, False]
        assert await anext(streams[0]) is HEARTBEAT
