"""Streams over a pretend worker: admission, deadlines, resumes, stops, slow readers, one last word each."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from app.generation import HEARTBEAT, Admission, Broken, Generation, Refused, Service
from app.metrics import Metrics
from app.worker_client import Lost
from model.protocol import Failed, Retention, SamplingParams
from tests.fake_worker import FakePool
from tests.tiny_text import byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


class Bench:
    """A service over a FakePool, and its metrics."""

    def __init__(self, tokenizer, admission=None, **behaviour):
        self.pool = FakePool(**behaviour)
        self.metrics = Metrics()
        self.service = Service(self.pool, tokenizer, admission or Admission(), self.metrics, "fake")

    def value(self, name, **labels):
        return self.metrics.registry.get_sample_value(f"everstream_{name}", labels)

    @asynccontextmanager
    async def running(self):
        task = asyncio.create_task(self.pool.run())
        beat = asyncio.create_task(self.service.keep_alive())
        try:
            yield self
        finally:
            task.cancel()
            beat.cancel()

    def lose(self, request, in_step=True, final=False):
        """The worker dies as far as this request is concerned."""
        inbox = self.pool.inboxes.pop(request)
        self.pool.engine.running = [s for s in self.pool.engine.running if s.submit.request != request]
        self.pool.engine.waiting = [s for s in self.pool.engine.waiting if s.submit.request != request]
        inbox.client = None
        inbox.put(Lost(in_step, final))


def ask(name="r", prompt=(1, 2, 3), **more):
    params = {key: more.pop(key) for key in list(more) if key in SamplingParams.__struct_fields__}
    retention = more.pop("retention", Retention())
    return Generation(name, tuple(prompt), SamplingParams(**params), retention, **more)


async def finish(stream, meanwhile=lambda: None):
    """Read a stream to its end."""
    async for _ in stream:
        meanwhile()


async def collect(service, generation):
    async with service.open(generation) as stream:
        return [delta async for delta in stream], stream.usage


async def text_of(service, generation):
    deltas, usage = await collect(service, generation)
    return "".join(d.text for d in deltas), deltas[-1].finish_reason, usage


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


async def test_poison_fails_after_dying_alone(tokenizer):
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


async def test_a_failed_request_ends_with_its_message(tokenizer):
    bench = Bench(tokenizer)
    async with bench.running(), bench.service.open(ask(max_tokens=500)) as stream:
        with pytest.raises(Broken, match="row 3 is not finite"):
            await finish(stream, lambda: bench.pool.inboxes["r"].put(Failed("r", 1, "row 3 is not finite")))


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
        assert await anext(stream) is HEARTBEAT
        bench.lose("r")
        assert await anext(stream) is HEARTBEAT
        bench.pool.paused = False
        bench.pool.wake.set()
        rest = [delta async for delta in stream]
    assert sum(len(d.tokens) for d in rest if d.choice >= 0) == 2


async def test_a_slow_reader_is_ended_and_memory_stays_bounded(tokenizer):
    bench = Bench(tokenizer, Admission(stream_buffer=64))
    async with bench.running(), bench.service.open(ask(max_tokens=3000)) as stream:
        await anext(stream)
        for _ in range(400):
            await asyncio.sleep(0)
        assert len(bench.pool.inboxes["r"]._events) <= 65
        with pytest.raises(Broken, match="pile up") as caught:
            await finish(stream)
    assert caught.value.code == "slow_reader"


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
