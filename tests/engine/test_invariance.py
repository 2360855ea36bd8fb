"""In float32 the same request gives the same ids and bit-equal logits, whatever happens around it.

On the default model with our kernels, and on a tiny one with torch's. Alone, among 31 others, in chunks of 7,
preempted twice, on a prefix hit, and under retention past its first eviction. The counters say that each of
these really happened.
"""

import random
from types import SimpleNamespace

import pytest
import torch

from model.config import EngineConfig
from model.decoder.kernels.reference import ReferenceBackend
from model.engine.admission import Limits
from model.engine.block_pool import BlockPool
from model.engine.engine import Engine
from model.engine.residence import Residence
from model.engine.runner import Runner
from model.engine.sampler import Sampler
from model.engine.scheduler import Scheduler
from model.engine.stats import Counters
from model.protocol import Retention, SamplingParams, Step, Submit
from model.worker import build
from tests.parity import tiny

OUTPUT = 10
NONE = Retention()
SINKS = Retention("sinks", 4, 32)


def prompt_of(seed, length):
    draw = random.Random(seed)
    return tuple(draw.randrange(90) for _ in range(length))


class Recorder:
    """An engine whose sampled logits are kept, request by request."""

    def __init__(self, engine):
        self.engine = engine
        self.logits, self.ids = {}, {}
        runner = self.engine._runner
        inner_run, decoder = runner.run, runner.decoder

        def decode(inputs, store):
            self.last = decoder.run(inputs, store)
            return self.last

        def run(plan, banned):
            results = inner_run(plan, banned)
            row = 0
            for planned in plan.rows:
                if planned.sample:
                    name = planned.sequence.group.submit.request
                    self.logits.setdefault(name, []).append(self.last[row].clone())
                    row += 1
            return results

        runner.decoder = SimpleNamespace(run=decode)
        runner.run = run

    def submit(self, name, prompt, retention=NONE, seed=3, tokens=OUTPUT, salt=""):
        params = SamplingParams(temperature=0.7, seed=seed, max_tokens=tokens, ignore_eos=True)
        self.engine.submit(Submit(name, 1, prompt, params, retention, salt=salt))
        self.ids[name] = []

    def step(self):
        for message in self.engine.step():
            if isinstance(message, Step):
                for row in message.rows:
                    self.ids[row.request] += row.tokens

    def run(self, preempt_at=()):
        """To the end; preempt the first sequence when it has so many tokens."""
        pending = list(preempt_at)
        while self.engine.has_work:
            self.step()
            running = self.engine.scheduler.running
            if pending and running and running[0].num_output >= pending[0]:
                pending.pop(0)
                self.engine.scheduler.preempt(running[0])
        self.engine.check()
        assert self.engine.stats().blocks_used == 0

    def counted(self, name):
        return getattr(self.engine.stats(), name)


def tiny_engine():
    """Torch's kernels, the oracle, on a small random model (a step of the whole one takes them a second)."""
    backend = ReferenceBackend("cpu", "float32")
    model = tiny.build("llama")
    spec, size, blocks = model.spec, 16, 400
    counters = Counters()
    residence = Residence(BlockPool(blocks), size, (0,) * len(spec.layers), counters)
    scheduler = Scheduler(residence, counters, 64, 32)
    runner = Runner(model.decoder(backend), backend, Sampler(spec.vocabulary), blocks, size, 96, 32)
    limits = Limits(spec.vocabulary, 1024, blocks, size, 1000, 1 << 20, 1 << 20, ("none", "sinks"), {})
    return Engine(runner, residence, scheduler, counters, limits, ())


@pytest.fixture(scope="module", params=["default model", "tiny model, torch"])
def recorder(request, default_model):
    if request.param != "default model":
        return Recorder(tiny_engine())
    config = EngineConfig(
        model=str(default_model),
        name="default",
        socket="",
        dtype="float32",
        num_blocks=400,
        token_budget=64,
        max_sequences=32,
    )
    return Recorder(build(config)[0])


@pytest.fixture(autouse=True)
def forgotten(recorder):
    """Each test begins without prefixes to find, except where it asks for them."""
    recorder.engine._residence._use_prefixes = False
    recorder.logits.clear()
    recorder.ids.clear()
    recorder.engine.scheduler.max_chunk = 64
    yield
    recorder.engine._residence._use_prefixes = True


PROMPT = prompt_of(1, 40)
LONG = prompt_of(2, 70)


@pytest.fixture(scope="module")
def alone(recorder):
    """The streams to compare with: one without retention, one that goes past its first eviction."""
    recorder.engine._residence._use_prefixes = False
    recorder.submit("plain", PROMPT)
    recorder.run()
    recorder.submit("sinks", LONG, SINKS)
    recorder.run()
    return {name: (recorder.ids[name], torch.stack(recorder.logits[name])) for name in ("plain", "sinks")}


def same(recorder, name, alone, kind):
    ids, logits = alone[kind]
    assert len(ids) == OUTPUT
    assert recorder.ids[name] == ids
    assert torch.equal(torch.stack(recorder.logits[name]), logits)


CASES = [("plain", PROMPT, NONE), ("sinks", LONG, SINKS)]


@pytest.mark.parametrize(("kind", "prompt", "retention"), CASES, ids=["plain", "sinks"])
def test_among_31_others(recorder, alone, kind, prompt, retention):
    for number in range(15):
        recorder.submit(f"before-{number}", prompt_of(10 + number, 1 + number), seed=number)
    recorder.submit("x", prompt, retention)
    for number in range(16):
        recorder.submit(f"after-{number}", prompt_of(40 + number, 1 + number // 2), SINKS, seed=number)
    most = 0
    while recorder.engine.has_work:
        recorder.step()
        most = max(most, recorder.counted("running"))
    assert most > 20
    same(recorder, "x", alone, kind)


@pytest.mark.parametrize(("kind", "prompt", "retention"), CASES, ids=["plain", "sinks"])
def test_in_chunks_of_seven(recorder, alone, kind, prompt, retention):
    recorder.engine.scheduler.max_chunk = 7
    steps = recorder.counted("steps")
    recorder.submit("x", prompt, retention)
    recorder.run()
    assert recorder.counted("steps") - steps == -(-len(prompt) // 7) + OUTPUT - 1
    same(recorder, "x", alone, kind)


@pytest.mark.parametrize(("kind", "prompt", "retention"), CASES, ids=["plain", "sinks"])
def test_preempted_twice(recorder, alone, kind, prompt, retention):
    before, replayed, evicted = (recorder.counted(n) for n in ("preemptions", "replayed_tokens", "tokens_evicted"))
    recorder.submit("x", prompt, retention)
    recorder.run(preempt_at=(3, 7))
    assert recorder.counted("preemptions") - before == 2
    assert recorder.counted("replayed_tokens") - replayed >= len(prompt)
    assert (recorder.counted("tokens_evicted") > evicted) == (kind == "sinks")  # the second time past an eviction
    same(recorder, "x", alone, kind)


@pytest.mark.parametrize(("kind", "prompt", "retention"), CASES, ids=["plain", "sinks"])
def test_on_a_prefix_hit(recorder, alone, kind, prompt, retention):
    recorder.engine._residence._use_prefixes = True
    recorder.submit("first", prompt, retention, tokens=1)
    recorder.run()
    hits, computed = recorder.counted("prefix_hits"), recorder.counted("prompt_tokens_computed")
    recorder.submit("x", prompt, retention)
    recorder.run()
    assert recorder.counted("prefix_hits") - hits >= len(prompt) - 16
    assert recorder.counted("prompt_tokens_computed") - computed <= 16
    same(recorder, "x", alone, kind)


OTHERS = [NONE, SINKS, Retention("sinks", 7, 32), Retention("sinks", 4, 40), Retention("sinks", 0, 40)]


@pytest.mark.parametrize("first", OTHERS, ids=lambda retention: f"{retention.policy}-{retention.sink_tokens}")
@pytest.mark.parametrize(("kind", "prompt", "retention"), CASES, ids=["plain", "sinks"])
def test_on_a_prefix_that_another_policy_left(recorder, alone, kind, prompt, retention, first):
    """What was computed before the first eviction has the same bits under every policy."""
    recorder.engine._residence._use_prefixes = True
    salt = f"{kind} after {first}"
    recorder.submit("first", prompt, first, tokens=1, salt=salt)
    recorder.run()
    hits = recorder.counted("prefix_hits")
    recorder.submit("x", prompt, retention, salt=salt)
    recorder.run()
    assert recorder.counted("prefix_hits") - hits >= 32
    same(recorder, "x", alone, kind)
