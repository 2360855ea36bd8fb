"""Rows 10 to 22 of the cases and their kind: every wrong request is a 4xx that names the field, before any stream."""

import gzip
import json
import re
import socket
import time
from dataclasses import replace

import pytest

from tests.http.reading import error_of, events

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(autouse=True)
def still_serves(served):
    """Whatever was sent, the service goes on for others and holds nothing of it."""
    yield
    assert served.complete(max_tokens=1)["usage"]["completion_tokens"] == 1
    assert served.open_streams() == 0


def refused(served, body, param, path=COMPLETIONS, status=400):
    """The error of a body that must be refused, streamed or not; it names the field."""
    given = {"prompt": "Hi"} if path == COMPLETIONS else {"messages": USER}
    for stream in (False, True):
        error = error_of(served.post(path, {**given, "stream": stream, **body}), status)
        assert error["param"] == param, error
    return error


@pytest.mark.parametrize(
    "prompt",
    [[], [[]], None, ["a", 1], [1, "a"], [[1], "a", []], [[1], []], {}, 5, True, [None], [[["a"]]], [1.5], [[1.5]],
     ["a", None], [True, False], {"text": "a"}, "a" * 5000, list(range(97, 123)) * 200],
    ids=lambda prompt: repr(prompt)[:20],
)  # fmt: skip
def test_prompts_that_are_none(served, prompt):
    refused(served, {"prompt": prompt}, "prompt")


@pytest.mark.parametrize("ids", [[999999999], [-1], [2**70], [258], [97, 98, -(2**63)], [[97], [2**31]], [2**64]])
def test_ids_outside_the_vocabulary(served, ids):
    refused(served, {"prompt": ids}, "prompt")


def test_an_empty_prompt_starts_from_the_begin_token(served):
    for prompt in ("", [""], [256]):
        answer = served.complete(prompt=prompt, max_tokens=1)
        assert answer["usage"]["prompt_tokens"] == 1
        assert served.pool.submitted[-1].prompt == (256,)


def test_a_missing_prompt_is_named(served):
    assert error_of(served.post(COMPLETIONS, {}))["param"] == "prompt"
    assert error_of(served.post(CHAT, {}))["param"] == "messages"


WRONG = {
    "n": [0, -1, 5_000_000, 129, 2**64, "1", 1.0, 1.5, True, []],
    "best_of": [0, 5_000_000, 2, "1"],
    "temperature": [-1, 999999, -0.0001, 2.0001, "1", True, [], {}, 1e308],
    "top_p": [-1, 0, 1.5, "1", -0.0],
    "min_p": [-0.1, 1.1],
    "typical_p": [0, 1.1],
    "top_k": [-2, 1.5, 2**40, "5"],
    "top_n_sigma": [-1, 1e9],
    "dynatemp_range": [-1, 3],
    "dynatemp_exponent": [0, -1, 100],
    "xtc_probability": [-0.1, 1.1],
    "xtc_threshold": [-0.1, 1.1],
    "dry_multiplier": [-1, 1e9],
    "dry_base": [0.5, 1e9],
    "dry_allowed_length": [0, -1, 10**9],
    "dry_range": [-1, 10**9],
    "dry_sequence_breakers": ["x", [""], ["x" * 300], ["x"] * 100, [1]],
    "repetition_penalty": [0, -1, 1e9, 1e-300, 5e-324],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1],
    "penalty_range": [-1, 10**9],
    "logit_bias": [{"191222": -100}, {"abc": 1}, {"5": 1e9}, {str(i): 1 for i in range(100_000)}, {"-1": 1}, {"1.5": 1},
                   {"05": 1}, {"5": "x"}, {"5": None}, [], {"٥": 1}, {"5": -101}, {"9" * 500: 1}, {" 5": 1}],
    "bad_words": ["x", [""], ["x"] * 300, ["x" * 300], [5]],
    "allowed_token_ids": [[], [258], [-1], [2**70], ["a"], [1.5]],
    "seed": [2**64, 2**63, -(2**63) - 1, -(2**70), "100", 1.5, True],
    "max_tokens": [-1, 2**64, 10_000_001, "16", 1.5],
    "min_tokens": [-1, 17, 2**70],
    "stop": ["", [""], ["a"] * 17, "a" * 300, [1], 5, {}, ["ok", ""], ["ok", None]],
    "stop_token_ids": [[258], [-1], [2**70], ["a"], list(range(129)), 5],
    "logprobs": [-1, 21, 5_000_000, True, "1"],
    "prompt_logprobs": [-1, 21, True],
    "echo": [1, "true"],
    "stream_options": [{"include_usage": 1}, {"foo": True}, [], {"continuous_usage_stats": True}],
    "trace": [-1, 21, True],
    "timeout": [0, -1, 1e9],
    "priority": [101, -101, 1.5],
    "ignore_eos": [1],
    "watch": ["yes"],
    "retention": ["sinks", [], {"policy": "lru"}, {"foo": 1}, {"policy": 4}],
}  # fmt: skip


@pytest.mark.parametrize("field", WRONG)
def test_values_out_of_range_or_of_another_type(served, field):
    for value in WRONG[field]:
        given = {"prompt": "Hi", field: value}
        for extra in ({}, {"stream": True}):
            error = error_of(served.post(COMPLETIONS, {**given, **extra}))
            assert (error["param"] or "").split(".")[0] == field, (value, error)


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "nan", "0x10", "01", "+1", ".5", "1."]
)
def test_numbers_that_are_none(served, value):
    for field in ("temperature", "top_p", "seed", "max_tokens"):
        data = f'{{"prompt": "Hi", "{field}": {value}}}'
        error_of(served.http.post(COMPLETIONS, content=data, headers={"content-type": "application/json"}))


CHAT_WRONG = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0.type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages.0.content.0.text"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, "y"]}]}, "messages.0.content.1"),
    ({"stop": ["ok", None]}, "stop.1"),
    ({"messages": [{"role": "user", "content": "x", "foo": 1}]}, "messages.0.foo"),
    ({"messages": [*USER, {"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages.1.tool_calls"),
    ({"messages": USER * 5000}, "messages"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"echo": True}, "echo"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), CHAT_WRONG, ids=[repr(body)[:50] for body, _ in CHAT_WRONG])
def test_chats_that_are_wrong(served, body, param):
    for extra in ({}, {"stream": True}):
        error = error_of(served.post(CHAT, {"messages": USER, **body, **extra}))
        assert param is None or error["param"] == param, error


NOT_SERVED = {
    "suffix": "x",
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": {"foo": "bar"}}}},
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "guided_json": {"type": "object"},
    "guided_regex": "foo**",
    "guided_choice": ["a"],
    "guided_grammar": "root ::= x",
    "structured_outputs": {"regex": "["},
    "regex": "(",
    "use_beam_search": True,
    "length_penalty": 2.0,
    "modalities": ["text", "audio"],
    "audio": {"voice": "x"},
    "prediction": {"type": "content", "content": "x"},
    "web_search_options": {},
    "reasoning_effort": "low",
    "truncate_prompt_tokens": 5,
    "mirostat": 2,
    "no_such_field": 1,
    "temprature": 0.5,
    "Temperature": 0.5,
    "": 1,
    "n ": 2,
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("field", NOT_SERVED)
def test_fields_that_are_unknown_or_not_honoured(served, path, field):
    error = refused(served, {field: NOT_SERVED[field]}, field, path)
    assert re.match(f"(the field )?{field!r}:? (is|asks|must|can|belongs) ", error["message"]), error


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_null_and_neutral_values_are_accepted(served, path):
    neutral = {
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "functions": [], "suffix": "",
        "modalities": ["text"],
        "response_format": {"type": "text"}, "length_penalty": 1.0, "use_beam_search": False, "logit_bias": {}, "n": 1,
        "stop": [], "user": "me", "metadata": {"a": "b"}, "store": False, "top_k": -1,
        "safety_identifier": "x", "frequency_penalty": 0, "presence_penalty": 0.0, "bad_words": [],
        "stop_token_ids": [], "service_tier": "auto",
    }  # fmt: skip
    given = {"prompt": "Hi"} if path == COMPLETIONS else {"messages": USER}
    nulls = dict.fromkeys((*neutral, *NOT_SERVED.keys() - {"no_such_field", "temprature", "Temperature", "", "n "}))
    nulls |= dict.fromkeys(
        ("temperature", "top_p", "seed", "logprobs", "stream_options", "retention", "timeout", "trace")
    )
    for fields in (neutral, nulls):
        answer = served.post(path, {**given, "max_tokens": 2, **fields})
        assert answer.status_code == 200, answer.text


def test_best_of_equal_to_n_is_neutral(served):
    assert len(served.complete(n=2, best_of=2, max_tokens=1)["choices"]) == 2
    refused(served, {"n": 2, "best_of": 3}, "best_of")


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b'"x"', b"null", b"5", b"true", b"{", b'{"prompt": "Hi"', b'{"prompt": "Hi"}x', b"{'prompt': 'Hi'}",
     b"\xff\xfe", b'{"prompt": "\\ud83d"}', b'{"prompt": "a\\ud83d b"}', b'{"prompt": "\\udc00"}',
     b'{"prompt": "\\ud83dx"}', b'{"prompt": "\xff"}',
     b'{"\\ud800": 1}', b'{"prompt": "\xed\xa0\x80"}', b"[" * 100_000, b'{"a":' * 100_000, b'{"prompt": [' * 500,
     b'{"prompt": "Hi", "seed": ' + b"9" * 100_000 + b"}", b'{"prompt": "Hi"} {"prompt": "Hi"}'],
    ids=lambda data: repr(data[:24]),
)  # fmt: skip
def test_bodies_that_are_no_request(served, data):
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        error_of(served.http.post(path, content=data, headers={"content-type": "application/json"}))


@pytest.mark.parametrize(
    "kind", ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data", "", "application/xml", "x"]
)
def test_other_content_types(served, kind):
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        response = served.http.post(path, content=b'{"prompt": "Hi"}', headers={"content-type": kind})
        assert error_of(response, 415)["code"] == "unsupported_media_type"
    for kind in ("application/json; charset=utf-8", "Application/JSON"):
        data = json.dumps({"prompt": "Hi", "max_tokens": 1})
        assert served.http.post(COMPLETIONS, content=data, headers={"content-type": kind}).status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate", "zstd", "GZIP", "gzip, identity", "x"])
def test_encoded_bodies(served, encoding):
    data = gzip.compress(b'{"prompt": "Hi"}') if "gzip" in encoding.lower() else b'{"prompt": "Hi", "max_tokens": 1}'
    headers = {"content-type": "application/json", "content-encoding": encoding}
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        error = error_of(served.http.post(path, content=data, headers=headers), 415)
        assert error["code"] == "unsupported_media_type"
        assert repr(encoding.lower()) in error["message"]
    headers["content-encoding"] = "identity"
    plain = b'{"prompt": "Hi", "max_tokens": 1}'
    assert served.http.post(COMPLETIONS, content=plain, headers=headers).status_code == 200


def test_a_hundred_megabytes_are_turned_away_at_once(served):
    host, port = served.url.removeprefix("http://").split(":")
    for length in (b"content-length: 104857600", b"transfer-encoding: chunked"):
        start = time.monotonic()
        with socket.create_connection((host, int(port)), timeout=10) as sock:
            sock.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" + length + b"\r\n\r\n"
            )
            if b"chunked" in length:
                block = b"100000\r\n" + b"a" * 0x100000 + b"\r\n"
                try:
                    for _ in range(100):
                        sock.sendall(block)
                except (BrokenPipeError, ConnectionResetError):
                    pass
            try:
                head = sock.recv(4096)
            except ConnectionResetError:
                head = b"HTTP/1.1 413"  # closed so early that the answer was lost with the rest of what we sent
        assert head.startswith(b"HTTP/1.1 413")
        assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", "1e999"), ("seed", "9" * 5000), ("logit_bias", '{"1": -1e400}')]
)
def test_numbers_that_no_machine_holds_name_their_field(served, field, value):
    data = f'{{"prompt": "Hi", "top_p": 0.5, "{field}": {value}}}'
    error = error_of(served.http.post(COMPLETIONS, content=data, headers={"content-type": "application/json"}))
    assert (error["param"], error["code"]) == (field, "invalid_value")


def test_another_model_is_not_found(served):
    for path, body in ((COMPLETIONS, {"prompt": "Hi"}), (CHAT, {"messages": USER}), ("/tokenize", {"prompt": "Hi"})):
        error = error_of(served.post(path, {**body, "model": "gpt-4"}), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert served.complete(model="fake", max_tokens=1)["model"] == "fake"


def test_a_prompt_over_the_context_suggests_sinks(serve):
    served = serve(context=64)
    error = refused(served, {"prompt": "a" * 64}, "prompt")
    assert "64" in error["message"]
    assert "sinks" in error["message"]
    assert served.complete(prompt="a" * 63)["choices"][0]["finish_reason"] == "length"
    error = refused(served, {"messages": [{"role": "user", "content": "a" * 64}]}, "messages", CHAT)
    assert error["code"] == "context_length_exceeded"


def test_a_prompt_over_the_cache_names_both_numbers(serve):
    served = serve(engine={"num_blocks": 8})
    error = refused(served, {"prompt": "a" * 200}, "prompt")
    assert "200" in error["message"]
    assert "128" in error["message"]
    assert error["code"] == "cache_too_small"
    assert "--cache-bytes, or --num-blocks" in error["message"]


def test_huge_numbers_of_choices_cost_nothing(served):
    start = time.monotonic()
    for body in (
        {"n": 5_000_000},
        {"best_of": 5_000_000},
        {"n": 2**62},
        {"prompt": ["a"] * 513},
        {"prompt": ["a"] * 512, "n": 4},
    ):
        error = error_of(served.post(COMPLETIONS, {"prompt": "Hi", **body}))
        assert error["param"] in ("n", "best_of", "prompt")
        assert any(number in error["message"] for number in ("128", "512", "1024", "n:"))
    assert time.monotonic() - start < 2


def test_the_templates_own_words(serve, tokenizer):
    strict = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant!') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    served = serve(using=_with(tokenizer, strict))
    error = refused(served, {"messages": USER + USER}, "messages", CHAT)
    assert "Conversation roles must alternate user/assistant!" in error["message"]
    assert error_of(served.post("/tokenize", {"messages": USER + USER}))["code"] == "template_refused"
    assert served.chat(max_tokens=1)["usage"]["prompt_tokens"] == 2


def test_a_model_without_a_template_says_so(serve, tokenizer):
    served = serve(using=_with(tokenizer, None))
    assert "/v1/completions" in refused(served, {}, "messages", CHAT)["message"]


def test_variables_nested_deeply(serve, tokenizer):
    served = serve(using=_with(tokenizer, "{{ deep }}{{ messages[0].content }}"))
    for depth in (5, 400, 480, 900):
        deep = b'{"a":' * depth + b"1" + b"}" * depth
        data = (
            b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "chat_template_kwargs": {"deep": %s}}'
        )
        response = served.http.post(CHAT, content=data % deep, headers={"content-type": "application/json"})
        if depth == 5:
            assert response.status_code == 200, response.text
        elif response.status_code != 200:
            error_of(response)
    assert served.chat(max_tokens=1)["choices"]


def test_no_more_candidates_of_a_prompt_than_an_answer_holds(serve):
    served = serve(context=100_000)
    error = refused(served, {"prompt": "a" * 20_000, "prompt_logprobs": 20}, "prompt_logprobs")
    assert "262144" in error["message"]
    answer = served.complete(prompt="a" * 4000, prompt_logprobs=0, max_tokens=1)
    assert len(answer["choices"][0]["prompt_logprobs"]) == 4000


def test_stream_options_without_a_stream(served):
    error = error_of(served.post(COMPLETIONS, {"prompt": "Hi", "stream_options": {"include_usage": True}}))
    assert error["param"] == "stream_options"
    assert events(served.post(COMPLETIONS, {"prompt": "Hi", "stream": True, "stream_options": {}}))


def _with(tokenizer, template):
    return replace(tokenizer, chat_template=template)
