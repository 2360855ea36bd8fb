"""Whatever the schedule, a request's tokens are those of its own stream, computed without any cache."""

import numpy as np
import pytest

from model.protocol import Retention, SamplingParams
from tests.engine.fake import LAYER_WINDOWS, NONE, Bench, Truth, prompt_of

POLICIES = {
    "none": NONE,
    "sinks": Retention("sinks", 3, 16),
    "no sinks": Retention("sinks", 0, 16),
    "window": Retention("window", 4, 14),
    "restart": Retention("restart", 3, 20),
}
SEEDED = SamplingParams(temperature=0.9, seed=11, max_tokens=120)


def expected(prompt, retention, params=SEEDED, choice=0):
    return Truth(retention).stream(prompt, params, choice)


@pytest.mark.parametrize("length", [1, 4, 17, 70])
@pytest.mark.parametrize("policy", POLICIES)
def test_alone(policy, length):
    prompt = prompt_of(length)
    bench = Bench()
    bench.submit("a", prompt, params=SEEDED, retention=POLICIES[policy])
    bench.run()
    assert bench.tokens("a") == expected(prompt, POLICIES[policy])
    assert bench.told["a", 0].finish == "length"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunk", [1, 3, 7, 13])
def test_in_chunks_of_any_size(policy, chunk):
    prompt = prompt_of(75, seed=1)
    bench = Bench()
    bench.scheduler.max_chunk = chunk
    bench.submit("a", prompt, params=SEEDED, retention=POLICIES[policy])
    bench.run()
    assert bench.tokens("a") == expected(prompt, POLICIES[policy])


@pytest.mark.parametrize("policy", POLICIES)
def test_preempted_again_and_again(policy):
    retention = POLICIES[policy]
    prompt = prompt_of(30, seed=2)
    bench = Bench()
    bench.submit("a", prompt, params=SEEDED, retention=retention)
    times = 0
    while bench.engine.has_work:
        bench.step()
        if bench.scheduler.running and bench.engine.counters.steps % 37 == 0:
            bench.scheduler.preempt(bench.scheduler.running[0])
            times += 1
    bench.run()
    assert bench.tokens("a") == expected(prompt, retention)
    assert bench.counters.preemptions == times >= 3
    assert bench.counters.replayed_tokens > 0
    if policy != "none":
        assert bench.told["a", 0].rows[-1].evicted > 50


@pytest.mark.parametrize("seed", range(6))
def test_many_at_once_in_a_small_pool(seed):
    """Mixed policies, lengths and numbers of choices, with blocks for a fraction of them."""
    policies = list(POLICIES.values())
    bench = Bench(num_blocks=34, max_sequences=7, token_budget=19)
    asked = {}
    for number in range(14):
        retention = policies[(number + seed) % len(policies)]
        prompt = prompt_of(1 + (number * 13 + seed * 7) % 60, seed=number % 5)
        params = SamplingParams(temperature=0.8, seed=number, max_tokens=5 + (number * 11 + seed) % 60)
        n = 1 + (number + seed) % 3
        asked[f"r{number}"] = (prompt, retention, params, n)
        bench.submit(f"r{number}", prompt, params=params, retention=retention, n=n)
        for _ in range(number % 4):
            bench.step()
    bench.run()
    assert bench.counters.preemptions > 0
    for request, (prompt, retention, params, n) in asked.items():
        for choice in range(n):
            assert bench.tokens(request, choice) == expected(prompt, retention, params, choice), (request, choice)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("length", [8, 21, 50])
def test_choices_share_the_prompts_blocks(policy, length):
    retention = POLICIES[policy]
    prompt = prompt_of(length, seed=3)
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=40)
    bench = Bench(num_blocks=96)
    bench.submit("a", prompt, params=params, retention=retention, n=4)
    while not bench.tokens("a", 3):
        bench.step()
    if policy == "none":
        first, *others = bench.scheduler.running
        assert len({tuple(s.blocks[: length // 4]) for s in (first, *others)}) == 1
        assert all(bench.pool.references(block) == 4 for block in first.blocks[: length // 4])
        assert bench.counters.prompt_tokens_computed == length
    bench.run()
    for choice in range(4):
        assert bench.tokens("a", choice) == expected(prompt, retention, params, choice)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prefix_hit_changes_nothing_but_the_work(policy):
    retention = POLICIES[policy]
    prompt = prompt_of(60, seed=4)
    bench = Bench()
    bench.submit("a", prompt, params=SEEDED, retention=retention)
    bench.run()
    computed, hits = bench.counters.prompt_tokens_computed, bench.counters.prefix_hits
    bench.submit("b", prompt, params=SEEDED, retention=retention)
    bench.run()
    assert bench.tokens("b") == bench.tokens("a") == expected(prompt, retention)
    if policy == "restart":
        return  # a later segment's keys are at other positions than anybody else's
    assert bench.counters.prefix_hits - hits >= 52
    assert bench.counters.prompt_tokens_computed - computed <= 8
    assert bench.told["b", 0].rows[0].cached_tokens >= 52


def test_a_stream_is_taken_up_where_its_last_window_ends():
    """The next turn of an endless chat: most of its blocks are gone, its last window is found."""
    retention = POLICIES["sinks"]
    prompt = prompt_of(40, seed=5)
    bench = Bench(num_blocks=16)
    bench.submit("a", prompt, params=SEEDED, retention=retention)
    bench.run()
    longer = [*prompt, *bench.tokens("a"), 7, 8, 9]
    computed = bench.counters.prompt_tokens_computed
    bench.submit("b", longer, params=SEEDED, retention=retention)
    bench.run()
    assert bench.tokens("b") == expected(longer, retention)
    assert bench.counters.prompt_tokens_computed - computed < 12
    assert bench.told["b", 0].rows[0].cached_tokens > 150


def test_a_prompt_far_longer_than_a_replay_is_not_computed_whole():
    retention = POLICIES["sinks"]
    reach = 1 + sum((min(own, 16) if own else 16) - 1 for own in LAYER_WINDOWS)
    prompt = prompt_of(400, seed=6)
    bench = Bench()
    bench.submit("a", prompt, params=SEEDED, retention=retention)
    bench.run()
    assert bench.tokens("a") == expected(prompt, retention)
    assert bench.counters.prompt_tokens_computed <= reach + 5 * 4
    # And what it leaves behind is exact: the same prompt, longer, goes on from it.
    longer = [*prompt, *bench.tokens("a")[:20]]
    computed = bench.counters.prompt_tokens_computed
    bench.submit("b", longer, params=SEEDED, retention=retention)
    bench.run()
    assert bench.tokens("b") == expected(longer, retention)
    assert bench.counters.prompt_tokens_computed - computed < 40


def test_policies_share_what_none_of_them_has_lost_yet_and_nothing_else():
    prompt = prompt_of(64, seed=7)
    params = SamplingParams(temperature=0, max_tokens=30)
    bench = Bench(num_blocks=200)
    bench.submit("a", prompt, params=params)
    bench.run()
    for name, retention, clean in (
        ("b", Retention("sinks", 3, 29), 32),
        ("c", Retention("sinks", 3, 29), 60),
        ("d", Retention("sinks", 2, 29), 28),
        ("e", Retention("window", 4, 29), 28),
        ("f", NONE, 60),
    ):
        hits = bench.counters.prefix_hits
        bench.submit(name, prompt, params=params, retention=retention)
        bench.run()
        assert bench.tokens(name) == expected(prompt, retention, params), name
        assert bench.counters.prefix_hits - hits == clean, name


@pytest.mark.parametrize("sinks", [0, 1, 3, 6])
@pytest.mark.parametrize("window", [7, 8, 12])
def test_nothing_is_shared_where_sinks_show_what_a_trained_window_hides(sinks, window):
    """One layer was trained with a window of 9: a stream's own window may end before it, and its sinks behind it."""
    assert 9 in LAYER_WINDOWS
    prompt = prompt_of(41, seed=3)
    params = SamplingParams(temperature=0, max_tokens=12)
    retention = Retention("sinks", sinks, window)
    bench = Bench(num_blocks=200)
    for name, policy in (("a", retention), ("b", NONE), ("c", retention), ("d", Retention("sinks", 2, 8)), ("e", NONE)):
        bench.submit(name, prompt, params=params, retention=policy)
        bench.run()
        assert bench.tokens(name) == expected(prompt, policy, params), name
    assert bench.counters.prefix_hits > 0


def test_keys_part_prefixes():
    prompt = prompt_of(32, seed=8)
    bench = Bench()
    for name, salt in (("a", "one"), ("b", "two"), ("c", "one")):
        bench.submit(name, prompt, salt=salt)
        bench.run()
    assert bench.counters.prefix_hits == 28  # only the third found the first's


def test_without_the_prefix_cache_nothing_is_found():
    prompt = prompt_of(32, seed=8)
    bench = Bench(prefix_cache=False)
    for name in "ab":
        bench.submit(name, prompt, params=SEEDED)
        bench.run()
    assert bench.counters.prefix_hits == bench.counters.prefix_queries == 0
    assert bench.tokens("b") == expected(prompt, NONE)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunk", [3, 64])
def test_prompt_logprobs_are_each_tokens_own(policy, chunk):
    retention = POLICIES[policy]
    prompt = prompt_of(77, seed=9)
    truth = Truth(retention)
    logits = [truth.push(token) for token in prompt]
    bench = Bench()
    for name in "ab":  # the second time a prefix could be found, and must not be
        bench.scheduler.max_chunk = chunk
        params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)
        bench.submit(name, prompt, params=params, retention=retention)
        steps = 0
        while bench.engine.has_work:
            bench.step()
            steps += 1
            if steps == 5 and bench.scheduler.running:
                bench.scheduler.preempt(bench.scheduler.running[0])
        told = bench.told[name, 0].prompt_logprobs
        assert [one.token for one in told] == prompt[1:]
        for one, row in zip(told, logits, strict=False):
            shifted = row.astype("float64") - row.max()
            want = shifted - np.log(np.exp(shifted).sum())
            assert one.logprob == pytest.approx(want[one.token], abs=1e-6)
            assert len(one.top) == 2
            assert one.top[0][1] == pytest.approx(want.max(), abs=1e-6)
        assert bench.tokens(name) == expected(prompt, retention, SamplingParams(temperature=0, max_tokens=3))
    bench.run()


def test_the_truth_can_tell():
    """The oracle's tokens do depend on sinks, window and policy."""
    prompt = prompt_of(50, seed=10)
    streams = {tuple(expected(prompt, retention)) for retention in POLICIES.values()}
    streams.add(tuple(expected(prompt, Retention("sinks", 3, 17))))
    streams.add(tuple(expected(prompt, Retention("sinks", 4, 16))))
    assert len(streams) == len(POLICIES) + 2
