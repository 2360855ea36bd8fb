"""Events that go from the worker's message to the socket in one call: the same bytes, whoever has to wait."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from app.choice import Choice
from app.connections import Chunks
from tests.http.reading import events, joined, whole
from tests.http.test_streams import both

POISON = 666


@pytest.fixture
def writes(monkeypatch):
    """What goes the short way, as it goes."""
    seen = []
    write = Chunks.write

    def told(chunks, data):
        seen.append(data)
        write(chunks, data)

    monkeypatch.setattr(Chunks, "write", told)
    return seen


@pytest.fixture
def gates(monkeypatch):
    """Answers of `Chunks.open`, taken in order; when they are used up, what it says itself."""
    answers = []
    own = Chunks.open

    def is_open(chunks):
        return own.fget(chunks) and (answers.pop() if answers else True)

    monkeypatch.setattr(Chunks, "open", property(is_open))
    return answers


@both
@pytest.mark.parametrize(
    "more", [{}, {"stop": ["zzz", "Q!"]}, {"trace": 2}, {"stream_options": {"include_usage": True}}]
)
def test_nearly_every_event_of_one_choice_goes_the_short_way(served, writes, path, body, more):
    asked = {**body, **more, "max_tokens": 40, "seed": 4}
    chunks = events(served.post(path, {**asked, "stream": True}))
    assert 30 <= len(writes) <= 40
    asked.pop("stream_options", None)
    chat = "messages" in body
    assert joined([c for c in chunks if c["choices"]], chat) == whole(served.post(path, asked).json(), chat)


@both
def test_a_way_that_closes_and_opens_loses_and_repeats_nothing(served, writes, gates, path, body):
    asked = {**body, "max_tokens": 200, "seed": 4}
    gates.extend(place % 7 > 2 or place % 5 == 0 for place in range(180))
    chunks = events(served.post(path, {**asked, "stream": True}))
    assert not gates
    assert 60 < len(writes) < 190
    chat = "messages" in body
    assert joined(chunks, chat) == whole(served.post(path, asked).json(), chat)


@both
def test_several_choices_keep_to_one_write_a_step(served, writes, path, body):
    events(served.post(path, {**body, "max_tokens": 20, "n": 2, "stream": True}))
    assert not writes


@both
def test_a_fault_on_the_short_way_is_one_error_event_and_the_end(served, monkeypatch, path, body):
    def full(chunks, data):
        raise ValueError("no words for this")

    monkeypatch.setattr(Chunks, "write", full)
    text = served.post(path, {**body, "max_tokens": 20, "stream": True}).text
    last = json.loads([block for block in text.split("\n\n") if block][-1].removeprefix("data: "))
    assert "(ValueError)" in last["error"]["message"]
    assert "no words" not in text
    monkeypatch.undo()
    assert served.complete(max_tokens=5)["choices"][0]["finish_reason"] == "length"
    assert served.open_streams() == 0


def test_a_fault_in_one_stream_leaves_the_others_alone(serve, monkeypatch):
    """Rows of all streams come in one call: what one of them raises must not end the worker's connection."""
    served = serve(delay=0.005)
    push, begin = Choice.push, Choice.__init__

    def begun(choice, number, options, *more):
        begin(choice, number, options, *more)
        choice.poisoned = options.params.seed == POISON

    def poisoned(choice, row):
        if choice.poisoned and row.index == 20:
            raise KeyError("a table without this entry")
        return push(choice, row)

    monkeypatch.setattr(Choice, "__init__", begun)
    monkeypatch.setattr(Choice, "push", poisoned)
    asked = {"prompt": "Hi", "max_tokens": 60, "stream": True}
    with ThreadPoolExecutor(4) as pool:
        seeds = [3, POISON, 4, 5]
        answers = list(pool.map(lambda seed: served.post("/v1/completions", {**asked, "seed": seed}).text, seeds))
    ends = [answer.split("\n\n")[-2] for answer in answers]
    assert "(KeyError)" in json.loads(ends.pop(1).removeprefix("data: "))["error"]["message"]
    assert ends == ["data: [DONE]"] * 3
    assert served.open_streams() == 0
