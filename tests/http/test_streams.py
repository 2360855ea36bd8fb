"""The streams of both endpoints, rows 1 to 9 of the cases: what comes when, and that the joined parts are the whole."""

import json
import time

import httpx
import pytest

from tests.http.reading import events, joined, whole

ALPHABET = tuple(b"DEFGHIJKLMNOPQRSTUVWXYZ")
EMOJI = "🫠🥹龜 나는 밥을 먹었다"
PATHS = [
    ("/v1/completions", {"prompt": "Hi"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
]
both = pytest.mark.parametrize(("path", "body"), PATHS, ids=["completions", "chat"])


def stream(served, path, body, **more):
    return events(served.post(path, {**body, **more, "stream": True}))


def text_of(chunks):
    return "".join((c.get("text") or c.get("delta", {}).get("content") or "") for k in chunks for c in k["choices"])


@both
@pytest.mark.parametrize("stops", [["DEFGHIJ"], ["GHI", "FGHIJ"], "JKL", ["Z"], ["zzz"]])
def test_no_character_of_a_stop_is_sent(serve, path, body, stops):
    served = serve(script=ALPHABET)
    chunks = stream(served, path, body, temperature=0, stop=stops, max_tokens=30)
    answer = served.post(path, {**body, "temperature": 0, "stop": stops, "max_tokens": 30}).json()
    shown = text_of(chunks)
    assert shown == whole(answer, "messages" in body)[0]["text"]
    alphabet = bytes(ALPHABET).decode()
    ends = [(alphabet.find(s) + len(s), alphabet.find(s)) for s in ([stops] if isinstance(stops, str) else stops)
            if s in alphabet]  # fmt: skip
    assert shown == (alphabet[: min(ends)[1]] if ends else alphabet)


@both
def test_a_stop_that_never_completes_is_flushed_at_the_end(serve, path, body):
    served = serve(script=tuple(b"THE TRE\nAAA"))
    chunks = stream(served, path, body, stop=["TRE\nAAAAAAAA"])
    assert text_of(chunks) == "THE TRE\nAAA"
    assert joined(chunks, "messages" in body)[0]["finish"] == "stop"
    cut = stream(served, path, body, stop=["TRE\nAAAAAAAA"], max_tokens=6)
    assert text_of(cut) == "THE TR"
    assert joined(cut, "messages" in body)[0]["finish"] == "length"


@pytest.mark.parametrize("max_tokens", range(1, len(EMOJI.encode()) + 2))
def test_no_broken_character_in_any_delta(serve, max_tokens):
    served = serve(script=tuple(EMOJI.encode()))
    chunks = stream(served, "/v1/completions", {"prompt": "x"}, max_tokens=max_tokens)
    assert all("\ufffd" not in choice["text"] for chunk in chunks for choice in chunk["choices"])
    shown = EMOJI.encode()[:max_tokens].decode(errors="ignore")
    assert text_of(chunks) == shown
    assert served.complete(prompt="x", max_tokens=max_tokens)["choices"][0]["text"] == shown


@both
def test_invalid_bytes_are_shown_and_an_incomplete_tail_is_dropped(serve, path, body):
    served = serve(script=(0xFF, 0x80, 0x41, 0xF0, 0x9F, 0x42, 0xED, 0xA0, 0x80, 0x43, 0xF0, 0x9F, 0xA5))
    assert text_of(stream(served, path, body)) == "\ufffd\ufffdA\ufffdB\ufffd\ufffd\ufffdC"


@both
def test_usage_comes_once_and_only_on_request(served, path, body):
    chunks = stream(served, path, body, max_tokens=5, stream_options={"include_usage": True})
    *others, last = chunks
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 5
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert last["usage"]["tokens_evicted"] == 0
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in others)
    for options in (None, {"include_usage": False}, {}):
        plain = stream(served, path, body, max_tokens=5, stream_options=options)
        assert all("usage" not in chunk and chunk["choices"] for chunk in plain)


@both
def test_usage_in_every_chunk(served, path, body):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(served, path, body, max_tokens=6, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 6


@both
def test_every_chunk_has_a_finish_reason_and_exactly_one_is_not_null(served, path, body):
    chunks = stream(served, path, body, max_tokens=10)
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert [reason for reason in reasons if reason is not None] == ["length"]
    assert reasons[-1] == "length"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} <= {"text_completion", "chat.completion.chunk"}


def test_the_first_chat_chunk_of_each_choice_has_the_role(served):
    chunks = stream(served, *PATHS[1], max_tokens=4, n=3)
    seen = set()
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert ("role" in choice["delta"]) == (choice["index"] not in seen)
            seen.add(choice["index"])
    assert seen == {0, 1, 2}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_text_offsets_count_up_with_an_echo(served):
    prompt = "Hé 🥹!"
    chunks = stream(served, "/v1/completions", {"prompt": prompt}, echo=True, logprobs=1, max_tokens=5)
    (choice,) = joined(chunks, chat=False)
    logprobs = choice["logprobs"]
    assert choice["text"].startswith(prompt)
    assert len({len(values) for values in logprobs.values()}) == 1
    assert len(logprobs["tokens"]) == len(prompt.encode()) + 5
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(isinstance(value, float) for value in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert logprobs["text_offset"][0] == 0
    assert logprobs["text_offset"][len(prompt.encode())] == len(prompt)
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)
    answer = served.complete(prompt=prompt, echo=True, logprobs=1, max_tokens=5, seed=chunks[0]["seed"])
    assert whole(answer, chat=False) == [choice]


def test_echo_alone_tells_the_prompt(served):
    answer = served.complete(prompt="Hello", echo=True, max_tokens=0, logprobs=1)
    (choice,) = answer["choices"]
    assert choice["text"] == "Hello"
    assert choice["logprobs"]["tokens"] == list("Hello")
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(value == -0.5 for value in choice["logprobs"]["token_logprobs"][1:])
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    chunks = stream(served, "/v1/completions", {"prompt": "Hello"}, echo=True, max_tokens=0, logprobs=1)
    assert joined(chunks, chat=False) == whole(answer, chat=False)


def test_chat_logprobs_without_candidates(served):
    answer = served.chat(logprobs=True, max_tokens=4)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 4
    assert all(entry["top_logprobs"] == [] for entry in content)
    assert "".join(entry["token"] for entry in content) == answer["choices"][0]["message"]["content"]
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in content)
    two = served.chat(logprobs=True, top_logprobs=2, max_tokens=4)["choices"][0]["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in two)
    assert served.chat(max_tokens=4)["choices"][0]["logprobs"] is None


def test_choices_and_prompts_keep_their_numbers(served):
    body = {"prompt": ["one", "two", "three"], "n": 2, "max_tokens": 5, "seed": 7}
    answer = served.post("/v1/completions", body).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    chunks = stream(served, "/v1/completions", body)
    assert joined(chunks, chat=False) == whole(answer, chat=False)
    assert answer["usage"] == {
        "prompt_tokens": 11,
        "completion_tokens": 30,
        "total_tokens": 41,
        "prompt_tokens_details": {"cached_tokens": 0},
        "tokens_evicted": 0,
    }
    same = served.post("/v1/completions", {**body, "prompt": ["one", "one"]}).json()
    assert len({choice["text"] for choice in same["choices"]}) == 4
    ids = served.post("/v1/completions", {**body, "prompt": [list(b"one"), list(b"two"), list(b"three")]}).json()
    assert whole(ids, chat=False) == whole(answer, chat=False)


@both
def test_a_seed_is_drawn_told_and_repeats(served, path, body):
    chat = "messages" in body
    first, second = (served.post(path, {**body, "max_tokens": 12}).json() for _ in range(2))
    assert first["seed"] != second["seed"]
    assert whole(first, chat) != whole(second, chat)
    assert 0 <= first["seed"] < 2**53
    assert whole(served.post(path, {**body, "max_tokens": 12, "seed": first["seed"]}).json(), chat) == whole(
        first, chat
    )
    chunks = stream(served, path, body, max_tokens=12, seed=first["seed"])
    assert [chunk["seed"] for chunk in chunks if "seed" in chunk] == [first["seed"]]
    assert joined(chunks, chat) == whole(first, chat)


@both
def test_all_that_one_step_gave_goes_out_in_one_write(serve, path, body):
    served = serve(delay=0.05)
    with served.http.stream("POST", path, json={**body, "n": 4, "max_tokens": 3, "stream": True}) as response:
        parts = list(response.iter_raw())
    steps = [part for part in parts if b'"finish_reason"' in part]
    assert len(steps) == 3
    for step in steps:
        lines = [line[6:] for line in step.decode().split("\n\n") if line.startswith("data: {")]
        assert {json.loads(line)["choices"][0]["index"] for line in lines} == {0, 1, 2, 3}


@both
def test_a_fault_in_mid_stream_is_one_error_event_and_the_end(serve, path, body):
    served = serve(settings={"request_timeout": 0.4}, delay=0.05)
    response = served.post(path, {**body, "max_tokens": 1000, "stream": True})
    assert response.status_code == 200
    *chunks, last = [block for block in response.text.split("\n\n") if block]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == "timeout"
    assert set(error) == {"message", "type", "param", "code"}
    assert len(chunks) > 1
    assert not any("error" in json.loads(chunk[6:]) for chunk in chunks)
    whole_answer = served.post(path, {**body, "max_tokens": 1000})
    assert whole_answer.status_code == 504
    assert whole_answer.json()["error"]["code"] == "timeout"


@both
def test_a_client_that_leaves_ends_its_streams(serve, path, body):
    served = serve(delay=0.02)
    with (
        httpx.Client(base_url=served.url, timeout=10) as http,
        http.stream("POST", path, json={**body, "max_tokens": 2000, "stream": True}) as response,
    ):
        chunks = response.iter_raw()  # kept: the response closes with its iterator
        next(chunks)
        assert served.open_streams() == 1
    end = time.monotonic() + 20
    while served.open_streams() and time.monotonic() < end:
        time.sleep(0.02)
    assert served.open_streams() == 0
    assert served.pool.cancelled


def test_silence_is_broken_by_comments(serve):
    served = serve(settings={"silence": 0.2}, delay=0.9)
    response = served.post("/v1/completions", {"prompt": "x", "max_tokens": 2, "stream": True})
    assert ": waiting\n\n" in response.text
    assert len(joined(events(response), chat=False)[0]["text"]) == 2
    assert len(served.complete(prompt="x", max_tokens=2)["choices"][0]["text"]) == 2
