"""Requests through the engine: how they end, who is let in, and in which order."""

import time

import pytest

from model.protocol import Accepted, Cancel, Rejected, Retention, SamplingParams
from tests.engine.fake import VOCABULARY, Bench, Truth, prompt_of

GREEDY = SamplingParams(temperature=0, max_tokens=20)
SINKS = Retention("sinks", 3, 16)


def finished(bench):
    return {key: told.finish for key, told in bench.told.items()}


# Ends.


def test_a_stop_token_ends_the_stream_and_is_its_last_token():
    prompt = prompt_of(9)
    whole = Truth().stream(prompt, GREEDY)
    stop = next(token for token in whole[4:] if token not in whole[:4])
    bench = Bench()
    bench.submit("a", prompt, params=SamplingParams(temperature=0, max_tokens=20, stop_token_ids=(stop,)))
    bench.run()
    told = bench.told["a", 0]
    assert (told.finish, told.stop_token) == ("stop", stop)
    assert told.tokens == whole[: whole.index(stop) + 1]


def test_stop_beats_length_at_the_same_token():
    prompt = prompt_of(9)
    whole = Truth().stream(prompt, GREEDY)
    place = next(i for i in range(3, 20) if whole[i] not in whole[:i])
    bench = Bench(eos=(whole[place],))
    bench.submit("a", prompt, params=SamplingParams(temperature=0, max_tokens=place + 1))
    bench.submit("b", prompt, params=SamplingParams(temperature=0, max_tokens=place + 1, ignore_eos=True))
    bench.run()
    assert finished(bench) == {("a", 0): "stop", ("b", 0): "length"}


def test_min_tokens_holds_the_end_back():
    prompt = prompt_of(9)
    first = Truth().stream(prompt, GREEDY)[0]
    params = SamplingParams(temperature=0, max_tokens=20, min_tokens=6)
    bench = Bench(eos=(first,))
    bench.submit("a", prompt, params=params)
    bench.run()
    assert bench.tokens("a") == Truth().stream(prompt, params, eos=(first,))
    assert first not in bench.tokens("a")[:6]


def test_the_context_ends_a_stream_without_retention():
    bench = Bench(context=40)
    bench.submit("a", prompt_of(31), params=SamplingParams(temperature=0, max_tokens=None))
    bench.run()
    assert len(bench.tokens("a")) == 9
    assert bench.told["a", 0].finish == "length"


def test_a_small_pool_ends_a_stream_without_retention_before_the_context_does():
    bench = Bench(num_blocks=6)
    bench.submit("a", prompt_of(5), params=SamplingParams(temperature=0, max_tokens=None))
    bench.run()
    assert 5 + len(bench.tokens("a")) == 24


def test_the_longest_stream_the_server_allows():
    bench = Bench(max_stream_tokens=70)
    bench.submit("a", prompt_of(5), params=SamplingParams(temperature=0, max_tokens=None), retention=SINKS)
    bench.run()
    assert len(bench.tokens("a")) == 70


@pytest.mark.parametrize("n", [1, 3])
def test_no_token_asked_for(n):
    bench = Bench()
    params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0)
    bench.submit("a", prompt_of(50), params=params, n=n)
    bench.run()
    assert finished(bench) == {("a", choice): "length" for choice in range(n)}
    assert bench.tokens("a") == []
    assert len(bench.told["a", 0].prompt_logprobs) == 49


# Admission.


@pytest.mark.parametrize(
    ("prompt", "fields", "reason", "words"),
    [
        ([], {}, "empty_prompt", "empty"),
        ([0, VOCABULARY], {}, "invalid_token", f"{VOCABULARY - 1}"),
        ([-1], {}, "invalid_token", "0 and"),
        (prompt_of(64), {}, "context", "64 tokens and the model's context is 64"),
        (prompt_of(45), {"blocks": 11}, "kv_pool", "45 tokens and the KV pool holds 44"),
        ([1], {"retention": Retention("sinks", 3, 2)}, "retention", "at least 4"),
        ([1], {"retention": Retention("sinks", 9, 8)}, "retention", "more than the sinks"),
        ([1], {"retention": Retention("sinks", -1, 8)}, "retention", "sinks"),
        ([1], {"retention": Retention("sinks", 3, 62)}, "retention", "64"),
        ([1], {"retention": Retention("window", 3, 1 << 40)}, "retention", "64"),
        ([1], {"retention": Retention("sinks", 3, 40), "blocks": 11}, "kv_pool", "needs 13 KV blocks"),
        ([1], {"retention": Retention("restart", 3, 16), "refused": True}, "retention", "because"),
        ([1], {"n": 0}, "invalid", "n is 0"),
    ],
)
def test_refused_with_the_numbers_and_the_remedy(prompt, fields, reason, words):
    limits = {"policies": ("none",), "refusals": {"restart": "because"}} if fields.pop("refused", False) else {}
    bench = Bench(num_blocks=fields.pop("blocks", 64), context=64, **limits)
    answer = bench.submit("a", prompt, **fields)
    assert isinstance(answer, Rejected)
    assert answer.reason == reason
    assert words in answer.message
    assert not bench.engine.has_work


def test_a_prompt_over_the_context_is_pointed_to_sinks_and_taken_under_them():
    bench = Bench(context=64)
    answer = bench.submit("a", prompt_of(300))
    assert "'sinks'" in answer.message
    assert isinstance(bench.submit("a", prompt_of(300), retention=SINKS), Accepted)
    bench.run()
    for policies, said in (
        (("none", "restart"), "shorten it, or stream it with retention policy 'restart'"),
        (("none",), "shorten it"),
    ):
        assert Bench(context=64, policies=policies).submit("a", prompt_of(300)).message.endswith(said)


def test_a_prompt_that_just_fits_is_taken():
    bench = Bench(context=64, num_blocks=16)
    assert isinstance(bench.submit("a", prompt_of(63)), Accepted)
    bench.run()
    assert len(bench.tokens("a")) == 1


def test_the_queue_has_limits():
    bench = Bench(max_waiting=3, max_waiting_tokens=30)
    assert isinstance(bench.submit("a", prompt_of(40)), Accepted)  # one that is long alone may wait
    assert bench.submit("b", prompt_of(4)).reason == "queue_tokens"
    bench.step()
    assert isinstance(bench.submit("c", prompt_of(5), n=3), Accepted)
    assert isinstance(bench.submit("d", prompt_of(5)), Accepted)
    assert isinstance(bench.submit("e", prompt_of(5)), Accepted)
    assert bench.submit("f", prompt_of(5)).message == "3 requests wait already; send it again in a moment"
    assert isinstance(bench.submit("g", prompt_of(50), attempt=2), Accepted), "it was taken once: it lost its worker"
    bench.run()


def test_choices_that_wait_for_their_turn_are_no_requests_that_wait():
    bench = Bench(max_waiting=2, max_sequences=2)
    assert isinstance(bench.submit("a", prompt_of(4), n=9), Accepted)
    for _ in range(3):
        bench.step()
    assert bench.scheduler.num_waiting == 7
    assert isinstance(bench.submit("b", prompt_of(4)), Accepted)
    assert isinstance(bench.submit("c", prompt_of(4)), Accepted)
    assert bench.submit("d", prompt_of(4)).reason == "queue_full"
    bench.engine.cancel(Cancel("b"))
    assert isinstance(bench.submit("d", prompt_of(4)), Accepted)
    bench.run()


def test_a_drained_engine_takes_nothing_and_finishes_what_runs():
    bench = Bench()
    bench.submit("a", prompt_of(5))
    bench.engine.draining = True
    assert bench.submit("b", prompt_of(5)).reason == "draining"
    bench.run()
    assert finished(bench) == {("a", 0): "length"}


# Order.


def first_steps(bench):
    return {key: next(i for i, row in enumerate(told.rows) if row.tokens) for key, told in bench.told.items()}


def test_lower_priority_numbers_go_first_and_waiting_makes_up_for_them():
    bench = Bench(max_sequences=1)
    now = time.monotonic()
    for name, priority, age in (("late", 0, 0.0), ("low", 2, 1.0), ("high", -1, 0.0), ("aged", 2, 31.0)):
        bench.submit(name, prompt_of(5), priority=priority)
        bench.engine._groups[name].arrived = now - age
    waiting = list(bench.scheduler.waiting())
    for sequence in waiting:  # put in again with their ages
        bench.scheduler.remove(sequence)
        sequence.finished = False
        bench.scheduler.add(sequence)
    order = []
    while bench.engine.has_work:
        bench.step()
        order += [key[0] for key in bench.told if key[0] not in order]
    assert order == ["aged", "high", "late", "low"]


def test_a_long_prompt_does_not_hold_up_a_short_one():
    bench = Bench(token_budget=16, num_blocks=128)
    bench.submit("long", prompt_of(400), params=GREEDY)
    bench.step()
    bench.submit("short", prompt_of(6), params=GREEDY)
    for _ in range(4):
        bench.step()
    assert bench.tokens("short")
    assert not bench.tokens("long")
    bench.run()
    assert bench.tokens("long") == Truth().stream(prompt_of(400), GREEDY)


def test_decode_rows_come_first_and_none_is_left_out():
    bench = Bench(token_budget=4, max_sequences=8)
    for number in range(7):
        bench.submit(f"r{number}", prompt_of(9, seed=number), params=GREEDY)
    bench.run()
    for number in range(7):
        rows = bench.told[f"r{number}", 0].rows
        assert [row.tokens for row in rows] == [(t,) for t in Truth().stream(prompt_of(9, seed=number), GREEDY)]


def test_waiting_too_long_is_a_refusal():
    bench = Bench(max_sequences=1)
    bench.submit("a", prompt_of(5), params=GREEDY)
    bench.step()
    bench.submit("b", prompt_of(5), queue_timeout=0.01)
    bench.submit("c", prompt_of(5), queue_timeout=60.0)
    time.sleep(0.02)
    bench.run()
    assert [(word.request, word.reason) for word in bench.words] == [("b", "queue_timeout")]
    assert finished(bench) == {("a", 0): "length", ("c", 0): "length"}


def test_one_that_must_run_alone_does_until_its_first_token():
    bench = Bench(num_blocks=20)
    for name in "ab":
        bench.submit(name, prompt_of(30, seed=ord(name)), params=GREEDY)
    for _ in range(4):
        bench.step()
    bench.submit("s", prompt_of(50, seed=1), params=GREEDY, alone=True)
    bench.begins.clear()
    bench.run()
    first = bench.begins[0]
    assert first.requests == ("s",)
    for name, length in (("a", 30), ("b", 30), ("s", 50)):
        seed = 1 if name == "s" else ord(name)
        assert bench.tokens(name) == Truth().stream(prompt_of(length, seed=seed), GREEDY)


def test_endless_streams_make_room_for_one_that_waited_long():
    bench = Bench(num_blocks=24)
    endless = SamplingParams(temperature=0, max_tokens=300)
    for name in "ab":
        bench.submit(name, prompt_of(30, seed=ord(name)), params=endless, retention=SINKS)
    for _ in range(60):
        bench.step()
    bench.submit("big", prompt_of(85), params=SamplingParams(temperature=0, max_tokens=4))
    for _ in range(10):
        bench.step()
    assert not bench.tokens("big")
    bench.engine._groups["big"].arrived -= 11.0
    for _ in range(10):
        bench.step()
    assert len(bench.tokens("big")) == 4
    bench.run()
    for name in "ab":
        assert bench.tokens(name) == Truth(SINKS).stream(prompt_of(30, seed=ord(name)), endless)


def test_begin_names_every_change_of_the_set():
    bench = Bench()
    bench.submit("a", prompt_of(5), params=GREEDY)
    bench.step()
    bench.step()
    assert [begin.requests for begin in bench.begins] == [("a",)]
    bench.submit("b", prompt_of(5), params=GREEDY)
    bench.step()
    assert bench.begins[-1].requests == ("a", "b")
    bench.run()
