"""Requests that are cancelled, fail, are taken up again or are watched. One last word each, always."""

import gc

import pytest

from app.ledger import Ledger
from model.engine.sequence import Group, Sequence
from model.protocol import Cancel, Failed, Resume, Retention, SamplingParams
from tests.engine.fake import LAYER_WINDOWS, NONE, VOCABULARY, Bench, FakeDecoder, Truth, prompt_of

GREEDY = SamplingParams(temperature=0, max_tokens=20)
SINKS = Retention("sinks", 3, 16)


def finished(bench):
    return {key: told.finish for key, told in bench.told.items()}


# Cancels.


@pytest.mark.parametrize("when", ["waiting", "prefilling", "running"])
def test_cancel_whenever(when):
    bench = Bench(max_sequences=1, token_budget=16)
    if when == "waiting":
        bench.submit("other", prompt_of(5), params=GREEDY)
        bench.step()
    bench.submit("a", prompt_of(40), params=GREEDY)
    for _ in range({"waiting": 0, "prefilling": 1, "running": 5}[when]):
        bench.step()
    bench.engine.cancel(Cancel("a"))
    bench.run()
    assert bench.told["a", 0].finish == "abort"
    assert bool(bench.tokens("a")) == (when == "running")


@pytest.mark.parametrize("born", [False, True])
@pytest.mark.parametrize("choice", [0, 1, 2])
def test_cancel_one_choice_of_three(born, choice):
    prompt = prompt_of(40)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12)
    bench = Bench(token_budget=16)
    bench.submit("a", prompt, params=params, n=3)
    bench.step()
    while born and not bench.tokens("a"):
        bench.step()
    bench.engine.cancel(Cancel("a", choice))
    bench.engine.cancel(Cancel("a", choice))  # twice is once
    bench.run()
    for number in range(3):
        told = bench.told["a", number]
        if number == choice:
            assert told.finish == "abort"
            assert len(told.tokens) == int(born)
        else:
            assert told.tokens == Truth().stream(prompt, params, number)


def test_cancel_all_three_one_by_one_before_they_are_born():
    bench = Bench(token_budget=16, num_blocks=128)
    bench.submit("a", prompt_of(400), n=3)
    bench.step()
    for choice in (0, 2, 1):
        bench.engine.cancel(Cancel("a", choice))
    bench.run(most=2)
    assert finished(bench) == {("a", choice): "abort" for choice in range(3)}


def test_a_choice_cancelled_before_a_prompt_without_tokens_ends_has_one_last_word():
    bench = Bench(token_budget=16)
    bench.submit("a", prompt_of(40), params=SamplingParams(max_tokens=0), n=2)
    bench.step()
    bench.engine.cancel(Cancel("a", 0))
    bench.run()
    assert finished(bench) == {("a", 0): "abort", ("a", 1): "length"}


def test_cancel_of_what_is_not_there_is_ignored():
    bench = Bench()
    bench.engine.cancel(Cancel("nobody"))
    bench.submit("a", prompt_of(5))
    bench.engine.cancel(Cancel("a", 7))
    bench.run()
    assert finished(bench) == {("a", 0): "length"}


# Faults.


def test_logits_that_are_no_numbers_end_their_own_request_only():
    bench = Bench(decoder=FakeDecoder(poison=7))
    bench.submit("good", [1, 2, 3], params=SamplingParams(temperature=0, max_tokens=6, bad_words=((7,),)))
    bench.submit("bad", [1, 2, 7], n=2)
    bench.run()
    assert [type(word) for word in bench.words] == [Failed]
    assert bench.words[0].request == "bad"
    assert "NaN" in bench.words[0].message
    assert not bench.words[0].reason
    assert bench.told["good", 0].finish == "length"


def test_controls_that_leave_no_token_are_the_requests_own_fault_in_a_sentence():
    bench = Bench()
    every = tuple((token,) for token in range(VOCABULARY))
    bench.submit("a", [1, 2], params=SamplingParams(temperature=0, bad_words=every))
    bench.run()
    assert "no token is left" in bench.words[0].message
    assert bench.words[0].reason == "no_token_left"


def test_a_fault_of_a_step_ends_all_requests_and_leaves_nothing_behind():
    bench = Bench()
    bench.submit("a", prompt_of(30), n=2)
    bench.step()
    bench.submit("b", prompt_of(30))
    words = bench.engine.fail_all("it broke")
    assert [(word.request, word.message) for word in words[:-1]] == [("a", "it broke"), ("b", "it broke")]
    assert words[-1].stats.running == words[-1].stats.waiting == 0
    bench.open.clear()
    bench.run()


# Taking up again.


SLIDING = [SINKS, Retention("restart", 3, 20), Retention("window", 4, 14)]
KNOWN = [(Retention(), False), *((retention, bounded) for retention in SLIDING for bounded in (False, True))]


@pytest.mark.parametrize(("retention", "bounded"), KNOWN)
@pytest.mark.parametrize("delivered", [1, 90])
def test_taken_up_on_another_worker(retention, delivered, bounded):
    """All ids, or only what a ledger keeps: the same stream goes on from the next token."""
    prompt = prompt_of(10)
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=120, frequency_penalty=0.3)
    whole = Truth(retention).stream(prompt, params)
    reach = 1 + 15 + 8 + 15
    kept = max(0, delivered - max(reach, 23) - 4) if bounded else 0
    counts = {token: whole[:delivered].count(token) for token in whole[:delivered]}
    resume = Resume(
        choice=0,
        num_output_tokens=delivered,
        tail=tuple(whole[kept:delivered]),
        tail_start=10 + kept,
        counts=tuple(sorted(counts.items())),
        head=(),
    )
    bench = Bench()
    bench.told["a", 0].tokens += whole[:delivered]
    bench.submit("a", prompt, attempt=2, params=params, retention=retention, resume=(resume,))
    bench.run()
    assert bench.tokens("a") == whole
    assert bench.told["a", 0].rows[0].attempt == 2
    assert bench.counters.replayed_tokens > 0
    if kept and retention.policy != "restart":
        assert bench.counters.prompt_tokens_computed < reach + 20


@pytest.mark.parametrize(
    "retention",
    [NONE, Retention("sinks", 3, 16), Retention("sinks", 9, 16), Retention("window", 0, 7), Retention("restart", 7, 9)],
    ids=lambda retention: f"{retention.policy}-{retention.sink_tokens}-{retention.window}",
)
@pytest.mark.parametrize("length", [1, 6])
def test_taken_up_after_any_token_from_what_the_ledger_holds(retention, length):
    """The worker may die after any token; what it knew of the stream is what the front end's ledger says."""
    prompt = prompt_of(length)
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=130, ignore_eos=True)
    whole = Truth(retention).stream(prompt, params)
    ledger = Ledger(0, length, retention, LAYER_WINDOWS, 4)
    undisturbed = Bench()
    undisturbed.submit("a", prompt, params=params, retention=retention)
    undisturbed.run()
    for delivered, token in enumerate(whole[:-1], 1):
        ledger.append(token)
        bench = Bench()
        bench.told["a", 0].tokens += whole[:delivered]
        resume = ledger.resume()
        bench.submit("a", prompt, attempt=2, params=params, retention=retention, resume=(resume,))
        while len(bench.tokens("a")) == delivered:
            bench.step()
        if delivered % 16 == 0:
            bench.run()
            assert bench.tokens("a") == whole
            before = undisturbed.told["a", 0].rows[delivered - 1].evicted
            assert bench.counters.tokens_evicted == undisturbed.counters.tokens_evicted - before, "each in one life"
            assert bench.told["a", 0].rows[-1].evicted == undisturbed.told["a", 0].rows[-1].evicted
        assert bench.tokens("a")[delivered] == whole[delivered], delivered


def test_sinks_that_lie_in_the_output_are_taken_up_too():
    retention = Retention("sinks", 6, 16)
    prompt = prompt_of(2)
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=200)
    whole = Truth(retention).stream(prompt, params)
    resume = Resume(0, 150, tuple(whole[90:150]), 92, (), False, tuple(whole[:8]))
    bench = Bench()
    bench.told["a", 0].tokens += whole[:150]
    bench.submit("a", prompt, params=params, retention=retention, resume=(resume,))
    bench.run()
    assert bench.tokens("a") == whole


def test_a_stream_at_position_ten_million_goes_on_as_one_at_three_hundred():
    """The same sinks and the same last tokens: only distances count, and they are the same."""
    head, middle, tail = prompt_of(8, seed=1), prompt_of(200, seed=2), prompt_of(100, seed=3)
    params = SamplingParams(temperature=0, max_tokens=10**8)
    near = Truth(SINKS).stream([*head, *middle, *tail], SamplingParams(temperature=0, max_tokens=40))
    bench = Bench(max_stream_tokens=10**7 + 132)
    bench.told["a", 0].tokens = Told10M(tail)
    resume = Resume(0, 10**7 + 92, tuple(tail), 10**7, ((1, 10**7 - 8), (2, 100)))
    bench.submit("a", head, params=params, retention=SINKS, resume=(resume,))
    bench.run()
    assert bench.tokens("a").new == near
    assert bench.told["a", 0].rows[-1].evicted == 10**7 + 100 + 40 - 1 - 3 - 15


class Told10M:
    """A list of ten million tokens of which only the new ones are held."""

    def __init__(self, tail):
        self.length = 10**7 - 8 + len(tail)
        self.new = []

    def __len__(self):
        return self.length + len(self.new)

    def __iadd__(self, tokens):
        self.new += tokens
        return self


def test_choices_taken_up_apart_and_the_finished_ones_left_alone():
    prompt = prompt_of(10)
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=30)
    whole = [Truth().stream(prompt, params, choice) for choice in range(3)]
    resume = tuple(Resume(c, n, tuple(whole[c][:n]), 10, (), c == 1) for c, n in ((0, 5), (1, 30), (2, 9)))
    bench = Bench()
    for choice, length in ((0, 5), (2, 9)):
        bench.told["a", choice].tokens += whole[choice][:length]
    bench.submit("a", prompt, params=params, n=3, resume=resume)
    bench.run()
    assert bench.tokens("a", 0) == whole[0]
    assert bench.tokens("a", 2) == whole[2]


def test_a_newer_attempt_replaces_the_older_and_an_older_one_is_refused():
    bench = Bench()
    bench.submit("a", prompt_of(30), attempt=2)
    bench.step()
    assert bench.submit("a", prompt_of(30), attempt=1).reason == "duplicate"
    bench.open.clear()
    bench.told.clear()
    bench.submit("a", prompt_of(30), attempt=3)
    bench.run()
    assert {row.attempt for row in bench.told["a", 0].rows} == {3}


# Watching.


def test_a_watched_stream_shows_its_blocks():
    bench = Bench()
    bench.submit("a", prompt_of(60), params=SamplingParams(temperature=0, max_tokens=30), retention=SINKS, watch=True)
    bench.run()
    rows = [row for row in bench.told["a", 0].rows if row.blocks]
    last = rows[-1].blocks
    assert [view.position for view in last][:2] == [0, 72]
    assert all(view.position % 4 == 0 and view.references == 1 for view in last)
    assert len(last) <= 5 + 2
    assert not rows[0].tokens  # the prompt's chunks are seen as well


def test_memory_of_a_long_stream_is_constant():
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=2000)
    bench = Bench()
    bench.submit("a", prompt_of(10), params=params, retention=SINKS)
    held = []
    while bench.engine.has_work:
        message = bench.engine.step()[-1]
        if bench.scheduler.running:
            sequence = bench.scheduler.running[0]
            held.append((sequence.log.num_held, len(sequence.blocks), bench.residence.prefixes.num_nodes))
    assert max(log for log, _, _ in held) <= 4 + 2 * (39 + 12)
    assert max(blocks for _, blocks, _ in held) <= 7
    touched = {block for block in range(64) if bench.pool._key_of[block] is not None}
    assert len(touched) < 20, "an endless stream goes round in a few blocks"
    assert message.stats.tokens_evicted == 10 + 2000 - 1 - 3 - 15


# What is left behind.


@pytest.mark.parametrize("end", ["finish", "stop", "cancel", "one by one", "fail", "refused"])
@pytest.mark.parametrize("retention", [Retention(), SINKS], ids=["whole", "sinks"])
def test_a_request_that_has_ended_is_let_go_of_at_once(end, retention):
    """Without the collector: its full rounds are rare, and what waits for them makes the worker grow for minutes."""
    bench = Bench(decoder=FakeDecoder(poison=5 if end == "fail" else -1))
    gc.collect()
    gc.disable()
    try:
        params = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=tuple(range(20)) if end == "stop" else ())
        prompt = [5, *prompt_of(20)] if end == "fail" else prompt_of(20)
        for number in range(4):
            timeout = 0.0 if end == "refused" else None
            bench.submit(f"r{number}", prompt, params=params, retention=retention, n=3, queue_timeout=timeout)
        for _ in range(0 if end == "refused" else 5):
            bench.step()
        for number in range(4):
            for choice in {"cancel": (-1,), "one by one": (1, 0, 2)}.get(end, ()):
                bench.engine.cancel(Cancel(f"r{number}", choice))
        bench.run()
        bench.submit("last", prompt_of(3), params=GREEDY)  # what the scheduler planned last is let go of
        bench.run()
        alive = [thing for thing in gc.get_objects() if type(thing) in (Group, Sequence)]
        names = {(thing.submit if type(thing) is Group else thing.group.submit).request for thing in alive}
        assert names <= {"last"}
    finally:
        gc.enable()


def test_deadlines_of_requests_that_began_do_not_pile_up():
    bench = Bench()
    for number in range(300):
        bench.submit(f"r{number}", prompt_of(3), params=SamplingParams(max_tokens=1), queue_timeout=600.0)
        bench.run()
    assert len(bench.scheduler._deadlines) <= 65
