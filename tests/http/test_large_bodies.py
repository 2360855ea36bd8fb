"""Bodies up to the limit, of every shape: none holds up the loop or fills the memory, and good ones are served."""

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from app.api import bodies
from app.api.bodies import parse_body
from app.api.errors import Invalid
from app.api.large_bodies import LONG, Turns, strings
from app.api.schemas import HARMLESS, NOT_HONOURED
from app.api.schemas_requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tests.http.reading import error_of
from tests.http.test_refusals import CHAT_WRONG, WRONG

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SINKS = {"retention": {"policy": "sinks"}}

MEASURE = """
import asyncio, json, resource, time
from app.api.bodies import read_body
from app.api.errors import Invalid
from app.api.schemas import HARMLESS, NOT_HONOURED
from app.api.schemas_requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from starlette.requests import Request
from tests.http.test_large_bodies import SHAPES, filled

async def ticks(gaps):
    while True:
        before = time.perf_counter()
        await asyncio.sleep(0.001)
        gaps.append(time.perf_counter() - before)

async def told(data, kind):
    async def receive():
        return {"type": "http.request", "body": data, "more_body": False}
    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
    try:
        return (await read_body(Request(scope, receive), kind)) and "taken"
    except Invalid as error:
        return error.message

async def main():
    results = {}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, (kind, *shape) in SHAPES.items():
        data, least = filled(*shape), 9.0
        for _ in range(3):  # the machine may have stood still
            gaps = []
            ticker = asyncio.create_task(ticks(gaps))
            said = await told(data, globals()[kind])
            await asyncio.sleep(0.01)
            ticker.cancel()
            least = min(least, max(gaps))
            if least < 0.2:
                break
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        results[name] = [said, least, (peak - before) >> 10]
    print(json.dumps(results))

asyncio.run(main())
"""

CONTENT = (b'{"messages":[{"role":"user","content":[', b"]}]}")
SHAPES = {
    "prompt of objects": ("CompletionRequest", b'{"prompt":[', b"{}", b"]}"),
    "prompt of lists": ("CompletionRequest", b'{"prompt":[', b"[1]", b"]}"),
    "prompt of empty lists": ("CompletionRequest", b'{"prompt":[', b"[]", b"]}"),
    "prompt of lists of lists": ("CompletionRequest", b'{"prompt":[[', b"[]", b"]]}"),
    "prompt of lists, then ids": ("CompletionRequest", b'{"prompt":[[1],', b"1", b"]}"),
    "prompt of texts": ("CompletionRequest", b'{"prompt":[', b'"a"', b"]}"),
    "prompt of texts with escapes": ("CompletionRequest", b'{"prompt":[', b'"\\\\"', b"]}"),
    "prompt of texts, then ids": ("CompletionRequest", b'{"prompt":["a",', b"1", b"]}"),
    "prompt of ids": ("CompletionRequest", b'{"prompt":[', b"1", b"]}"),
    "prompt of long ids": ("CompletionRequest", b'{"prompt":[', b"123456789012345678901", b"]}"),
    "prompt of fractions": ("CompletionRequest", b'{"prompt":[', b"1.5", b"]}"),
    "prompt of nulls": ("CompletionRequest", b'{"prompt":[', b"null", b"]}"),
    "prompt that is an object": ("CompletionRequest", b'{"prompt":{', b'"a":{}', b"}}"),
    "prompt, again and again": ("CompletionRequest", b"{", b'"prompt":1', b"}"),
    "escapes": ("CompletionRequest", b'{"prompt":"', b"\\u0041", b'"}'),
    "unknown fields": ("CompletionRequest", b"{", b'"k%d":1', b"}"),
    "logit_bias": ("CompletionRequest", b'{"prompt":"x","logit_bias":{', b'"%d":1', b"}}"),
    "stop": ("CompletionRequest", b'{"prompt":"x","stop":[', b'"a"', b"]}"),
    "bad_words": ("CompletionRequest", b'{"prompt":"x","bad_words":[', b"{}", b"]}"),
    "allowed ids": ("CompletionRequest", b'{"prompt":"x","allowed_token_ids":[', b"1", b"]}"),
    "retention": ("CompletionRequest", b'{"prompt":"x","retention":[', b"[]", b"]}"),
    "tools": ("CompletionRequest", b'{"prompt":"x","tools":[', b"{}", b"]}"),
    "names, again and again": ("CompletionRequest", b"{", b'"n":1', b"}"),
    "metadata": ("CompletionRequest", b'{"prompt":"x","metadata":[', b"[]", b"]}"),
    "lists in a short field": ("CompletionRequest", b'{"prompt":"x","seed":[', b"[[]]", b"]}", 65_000),
    "lists for the template": (
        "ChatRequest",
        b'{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"a":[',
        b"[]",
        b"]}}",
        262_000,
    ),
    "a list": ("CompletionRequest", b"[", b"{}", b"]"),
    "messages of nothing": ("ChatRequest", b'{"messages":[', b"{}", b"]}"),
    "messages": ("ChatRequest", b'{"messages":[', b'{"role":"user"}', b"]}"),
    "messages of another type": ("ChatRequest", b'{"messages":[', b"[]", b"]}"),
    "parts of nothing": ("ChatRequest", CONTENT[0], b"{}", CONTENT[1]),
    "parts": ("ChatRequest", CONTENT[0], b'{"type":"text","text":""}', CONTENT[1]),
    "a message's fields": ("ChatRequest", b'{"messages":[{"role":"user",', b'"k%d":1', b"}]}"),
    "a message's calls": ("ChatRequest", b'{"messages":[{"role":"user","tool_calls":[', b"{}", b"]}]}"),
    "variables": ("ChatRequest", b'{"messages":[],"chat_template_kwargs":{"a":[', b"[]", b"]}}"),
    "tokenize messages": ("TokenizeRequest", b'{"messages":[', b"{}", b"]}"),
    "tokenize a list": ("TokenizeRequest", b'{"prompt":[', b"1", b"]}"),
    "detokenize": ("DetokenizeRequest", b'{"tokens":[', b"1", b"]}"),
    "detokenize lists": ("DetokenizeRequest", b'{"tokens":[', b"[]", b"]}"),
    "detokenize objects": ("DetokenizeRequest", b'{"tokens":[', b"{}", b"]}"),
}
TAKEN = {"prompt of ids", "prompt of long ids", "escapes", "metadata", "lists for the template"}


def filled(before, item, after, size=16 << 20):
    """A body of nearly `size` bytes: as many of the item as go into it, numbered where they have a place for that."""
    separator = b"" if item.startswith(b"\\u") else b","
    if b"%d" not in item:
        number = (size - len(before) - len(after)) // (len(item) + len(separator))
        return before + (item + separator) * (number - 1) + item + after
    body = bytearray(before + item % 0)
    for number in range(1, (size - 100) // (len(item) + 7)):
        body += separator + item % number
    return bytes(body + after)


def test_no_shape_of_a_body_holds_up_the_loop_or_fills_the_memory():
    command = [sys.executable, "-c", MEASURE]
    ran = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    results = json.loads(ran.stdout)
    assert {name for name, (said, *_) in results.items() if said == "taken"} == TAKEN
    assert not {name: gap for name, (_, gap, _) in results.items() if gap > 0.3}
    most = max(megabytes for *_, megabytes in results.values())
    assert most < 16 * 12, {name: megabytes for name, (*_, megabytes) in results.items()}


@pytest.mark.parametrize(
    ("kind", "shape", "param", "words"),
    [
        (CompletionRequest, "prompt of lists", "prompt", "a list of at most 512 of either"),
        (CompletionRequest, "prompt of texts", "prompt", "a list of at most 512 of either"),
        (CompletionRequest, "prompt of objects", "prompt", "(given: [{},{},"),
        (CompletionRequest, "unknown fields", "k0", "the field 'k0' is not known here"),
        (CompletionRequest, "logit_bias", "logit_bias", "bytes of JSON are over the limit of 65536"),
        (CompletionRequest, "tools", "tools", "not served yet"),
        (CompletionRequest, "a list", None, "must be a JSON object"),
        (ChatRequest, "messages", "messages", "at most 4096 items"),
        (ChatRequest, "messages of nothing", "messages.0", "missing required field `role`"),
        (ChatRequest, "parts of nothing", "messages.0.content.0", "missing required field `type`"),
        (ChatRequest, "parts", "messages.0.content", "at most 4096 items"),
        (ChatRequest, "a message's calls", "messages.0.tool_calls", "'tool_calls' is not served yet"),
        (ChatRequest, "a message's fields", "messages.0", "unknown field `k0`"),
        (TokenizeRequest, "tokenize a list", "prompt", "must be a text (given: [1,1,"),
        (DetokenizeRequest, "detokenize lists", "tokens", "must be a list of token ids"),
    ],
)
def test_refusals_of_long_bodies_name_the_field(kind, shape, param, words):
    data = filled(*SHAPES[shape][1:], size=300_000)
    with pytest.raises(Invalid) as refused:
        parse_body(data, kind)
    assert refused.value.param == param
    assert words in refused.value.message


def test_limits_that_only_long_bodies_reach():
    many = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": "x" * (1 << 18)}}
    for kind, body, param, words in (
        (CompletionRequest, {"prompt": "x", "stop": "x" * (1 << 16)}, "stop", "over the limit of 65536"),
        (ChatRequest, many, "chat_template_kwargs", "over the limit of 262144"),
        (CompletionRequest, {"prompt": "x", "bad_words": [[]] * 20_000}, "bad_words", "must be a list of texts"),
        (
            CompletionRequest,
            {"prompt": "x", "allowed_token_ids": ["a"] * 20_000},
            "allowed_token_ids",
            "of ids (given: [",
        ),
        (CompletionRequest, {"prompt": ["a"] * 600_000}, None, "more than 262144 texts"),
        (ChatRequest, {"messages": [{"role": "user"}] * 280_000}, None, "send fewer messages or parts"),
        (DetokenizeRequest, {"tokens": [1] * ((1 << 20) + 1)}, "tokens", "1048577 ids are over the limit of 1048576"),
        (CompletionRequest, {"prompt": [10**5000] * 20}, "prompt", "thousands of digits"),
    ):
        with pytest.raises(Invalid) as refused:
            parse_body(json.dumps(body).encode() if "thousands" not in words else _digits(), kind)
        assert refused.value.param == param
        assert words in refused.value.message
    half = b'{"user": "%b", "prompt": "\\ud83d"}' % (b"x" * LONG)
    with pytest.raises(Invalid, match="half of a surrogate pair"):
        parse_body(half, CompletionRequest)


def _digits():
    return b'{"prompt": [%b]}' % b",".join([b"9" * 5000] * 20)


GOOD = [
    (CompletionRequest, {"prompt": "x" * 40_000, "max_tokens": 5, "user": "me", "tools": [], "seed": None}),
    (CompletionRequest, {"prompt": list(range(100_000))}),
    (CompletionRequest, {"prompt": [-5, 2**80, 0] * 9_000, "logit_bias": {"5": -1.5}}),
    (CompletionRequest, {"prompt": [[number] * 100 for number in range(512)]}),
    (CompletionRequest, {"prompt": ['"\\"[]{},\\\\' * 9] * 512}),
    (CompletionRequest, {"prompt": "x", "allowed_token_ids": list(range(1 << 16))}),
    (CompletionRequest, {"prompt": "x", "bad_words": ["\u00e9" * 256] * 256}),
    (CompletionRequest, {"prompt": []}),
    (CompletionRequest, {"prompt": [[], [1]], "stop": ["a", "b"], **SINKS}),
    (ChatRequest, {"messages": [{"role": "user", "content": "Hé \U0001f979"}] * 4096, "top_p": 0.5}),
    (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 4096}]}),
    (
        ChatRequest,
        {
            "messages": [
                {"role": "assistant", "content": None, "tool_calls": [], "refusal": None, "audio": None, "name": "me"}
            ],
            "chat_template_kwargs": {"a": [{"b": [1.5, None]}]},
        },
    ),
    (TokenizeRequest, {"prompt": "나" * 100_000}),
    (TokenizeRequest, {"messages": [{"role": "user", "content": "x"}] * 3, "prompt": None}),
    (DetokenizeRequest, {"tokens": list(range(200_000)), "model": "fake"}),
    (TokenizeRequest, {"prompt": "x" * 40_000, "messages": None, "chat_template_kwargs": None, "model": None}),
    (DetokenizeRequest, {"tokens": []}),
]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize(("kind", "body"), GOOD, ids=range(len(GOOD)))
def test_long_bodies_are_read_as_short_ones_are(monkeypatch, kind, body, indent):
    data = json.dumps(body, ensure_ascii=bool(indent), indent=indent).encode()
    monkeypatch.setattr(bodies, "LONG", len(data))
    short = parse_body(data, kind)
    monkeypatch.setattr(bodies, "LONG", 0)
    assert parse_body(data, kind) == short
    assert parse_body(data, kind).model_fields_set == short.model_fields_set


def test_what_is_wrong_with_a_short_body_is_wrong_with_a_long_one(monkeypatch):
    monkeypatch.setattr(bodies, "LONG", 0)
    wrong = [(CompletionRequest, {"prompt": "Hi", name: value}) for name in WRONG for value in WRONG[name]]
    wrong += [(ChatRequest, {"messages": [{"role": "user", "content": "Hi"}], **body}) for body, _ in CHAT_WRONG]
    for kind, body in wrong:
        data = json.dumps(body).encode()
        monkeypatch.setattr(bodies, "LONG", len(data))
        short = _refusal(data, kind)
        monkeypatch.setattr(bodies, "LONG", 0)
        long = _refusal(data, kind)
        assert (long is None) == (short is None), data[:100]
        if short and short.param:
            assert long.param.split(".")[:1] == short.param.split(".")[:1], data[:100]


PLAIN = {
    CompletionRequest: {"prompt": "Hi"},
    ChatRequest: {"messages": [{"role": "user", "content": "Hi"}]},
    TokenizeRequest: {"prompt": "Hi"},
    DetokenizeRequest: {"tokens": [1]},
}
VALUES = [
    None, 0, -1, True, 1.0, 1.5, "", "a", [], ["a"], [1], [1.0], [True], [None], [[]], [[1]], [["a"]], [["a"], "b"],
    [1, [1]], [[1], 1], [[1], [[1]]], [{}], {}, {"a": 1}, {"5": 1}, {"5": None}, {"type": "text"}, ["text"],
    *(
        [{"role": "user", **message}]
        for message in (
            {"content": None}, {"content": []}, {"content": [{"type": "text", "text": "a"}]},
            {"content": [{"type": "text"}]}, {"content": [{"type": "text", "text": "a", "x": 1}]},
            {"content": "x", "refusal": None, "annotations": [], "name": None, "function_call": None},
            {"content": "x", "refusal": "no"}, {"content": "x", "function_call": {}}, {"content": "x", "role": "tool"},
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: kind.__name__)
def test_every_field_takes_and_refuses_the_same_in_long_bodies(monkeypatch, kind):
    for name in (*kind.model_fields, *HARMLESS, *NOT_HONOURED, "unknown"):
        for value in VALUES:
            data = json.dumps({**PLAIN[kind], name: value}).encode()
            monkeypatch.setattr(bodies, "LONG", len(data))
            short = _refusal(data, kind)
            monkeypatch.setattr(bodies, "LONG", 0)
            long = _refusal(data, kind)
            assert (long is None) == (short is None), data
            if short is not None:
                assert (long.param or "").split(".")[0] == (short.param or "").split(".")[0], data


def _refusal(data, kind):
    try:
        parse_body(data, kind)
    except Invalid as error:
        return error
    return None


@pytest.mark.parametrize("texts", [[], ["a"], ['"'], ["\\"], ['\\"', '"\\'], ["", "\\\\", '"""'] * 9])
def test_strings_are_counted_to_a_factor_of_two(texts):
    for data in (json.dumps(texts), json.dumps({text: text for text in texts})):
        value = data.encode()
        number = len(texts) if value[:1] == b"[" else 2 * len(dict.fromkeys(texts))
        assert number <= strings(value) <= 2 * number


def test_long_bodies_are_served(served):
    answer = served.complete(prompt=[97] * 300_000, max_tokens=2, **SINKS)
    assert answer["usage"]["prompt_tokens"] == 300_000
    answer = served.complete(prompt=[[97 + number % 26] * 30 for number in range(512)], max_tokens=1)
    assert [choice["index"] for choice in answer["choices"]] == list(range(512))
    body = {"messages": [{"role": "user", "content": "Hello!"}] * 4000, "max_tokens": 2, **SINKS}
    answer = served.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    ids = [97] * 400_000
    assert served.post("/detokenize", {"tokens": ids}).json()["prompt"] == "a" * len(ids)
    error = error_of(served.post(COMPLETIONS, {"prompt": [97] * 400_000 + [999], **SINKS}))
    assert (error["param"], error["code"]) == ("prompt", "invalid_token")


async def test_bodies_wait_for_their_turn_and_too_many_are_turned_away():
    turns, begun, go = Turns(most=100), threading.Event(), threading.Event()
    ran = []

    def work(data):
        begun.set()
        go.wait(10)
        ran.append(data)
        return len(data)

    first = asyncio.create_task(turns.read(b"1" * 60, work))
    second = asyncio.create_task(turns.read(b"2" * 40, work))
    await asyncio.sleep(0.01)
    with pytest.raises(Invalid) as refused:
        await turns.read(b"3", work)
    assert (refused.value.status, refused.value.code) == (503, "overloaded")
    second.cancel()
    await asyncio.sleep(0.01)
    third = asyncio.create_task(turns.read(b"3" * 40, work))
    await asyncio.sleep(0.01)
    go.set()
    assert await asyncio.gather(first, third) == [60, 40]
    assert ran == [b"1" * 60, b"3" * 40], "who left before his turn is not read"
