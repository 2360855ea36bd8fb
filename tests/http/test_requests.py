"""What reaches the worker: defaults, controls, prompts, retention; and the endpoints about tokens and models."""

import asyncio
import time
from dataclasses import replace

import httpx
import pytest
from msgspec import structs

from model.protocol import Retention, SamplingParams
from tests.http.reading import error_of, events

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
HI = "<s>user: Hi\nassistant: "


def sent(served, path=COMPLETIONS, **body):
    """The Submit that a request became."""
    given = {"prompt": "Hi"} if path == COMPLETIONS else {"messages": USER}
    answer = served.post(path, {**given, **body})
    assert answer.status_code == 200, answer.text
    return served.pool.submitted[-1]


def test_defaults(served):
    submit = sent(served)
    assert structs.replace(submit.params, seed=0) == SamplingParams()
    assert (submit.n, submit.retention, submit.priority, submit.watch) == (1, Retention(), 0, False)
    assert submit.prompt == tuple(b"Hi")


def test_every_control_arrives(served):
    controls = {
        "temperature": 0.5, "dynatemp_range": 0.25, "dynatemp_exponent": 2.0, "top_k": 40, "top_p": 0.9, "min_p": 0.05,
        "typical_p": 0.8, "top_n_sigma": 1.5, "xtc_probability": 0.5, "xtc_threshold": 0.2, "dry_multiplier": 0.8,
        "dry_base": 2.0, "dry_allowed_length": 3, "dry_range": 512, "repetition_penalty": 1.1, "presence_penalty": -0.5,
        "frequency_penalty": 0.5, "penalty_range": 64, "seed": -5, "min_tokens": 2, "max_tokens": 9, "ignore_eos": True,
        "logprobs": 3, "prompt_logprobs": 4,
    }  # fmt: skip
    params = sent(served, **controls).params
    assert {name: getattr(params, name) for name in controls} == controls
    more = {
        "logit_bias": {"98": 5, "97": -100}, "bad_words": ["no"], "allowed_token_ids": [97, 98, 97],
        "stop_token_ids": [33],        "dry_multiplier": 1, "dry_sequence_breakers": ["\n", "ab"], "trace": 5,
    }  # fmt: skip
    params = sent(served, **more).params
    assert params.logit_bias == ((97, -100.0), (98, 5.0))
    assert params.bad_words == (tuple(b"no"), tuple(b" no"))
    assert params.allowed_token_ids == (97, 98)
    assert params.stop_token_ids == (33,)
    assert params.dry_breakers == (10, 98)
    assert (params.trace, params.logprobs) == (5, 5)
    assert sent(served, dry_multiplier=1).params.dry_breakers == tuple(b'\n:"*')
    assert sent(served, top_k=-1).params.top_k == 0
    assert sent(served, top_k=9999).params.top_k == 258
    assert sent(served, logprobs=0).params.logprobs == 0
    assert sent(served, priority=7).priority == 7
    assert sent(served, watch=True).watch


def test_a_temperature_of_next_to_nothing_stays_one_that_logits_can_be_divided_by(served):
    for given in (5e-324, 1e-300, 1e-40, 1e-9):
        assert sent(served, temperature=given).params.temperature == 1e-6
    assert sent(served, temperature=0).params.temperature == 0
    assert sent(served, temperature=2e-6).params.temperature == 2e-6
    assert sent(served, repetition_penalty=1e-6).params.repetition_penalty == 1e-6


def test_the_length_of_answers(served):
    assert sent(served).params.max_tokens == 16
    assert sent(served, max_tokens=None).params.max_tokens == 16
    assert sent(served, CHAT, temperature=0, stop=["a", "e", "i", "o", "u"]).params.max_tokens == 4096 - len(HI) + 2
    assert sent(served, CHAT, max_completion_tokens=3).params.max_tokens == 3
    assert sent(served, CHAT, max_completion_tokens=3, max_tokens=3).params.max_tokens == 3
    endless = sent(served, max_tokens=None, retention={"policy": "sinks"}, stop=["a", "b"])
    assert endless.params.max_tokens == 10_000_000 - 2
    endless = sent(served, CHAT, max_completion_tokens=None, retention={"policy": "window"}, stop=["a", "b"])
    assert endless.params.max_tokens == 10_000_000 - len(HI) + 2


RETENTION = [
    ({"policy": "sinks"}, Retention("sinks", 4, 1020)),
    ({"policy": "sinks", "sink_tokens": 0, "window": 16}, Retention("sinks", 0, 16)),
    ({"policy": "sinks", "sink_tokens": None, "window": None}, Retention("sinks", 4, 1020)),
    ({"policy": "window"}, Retention("window", 0, 1020)),
    ({"policy": "window", "sink_tokens": 0, "window": 1024}, Retention("window", 0, 1024)),
    ({"policy": "restart", "window": 100}, Retention("restart", 4, 100)),
    ({"policy": "none"}, Retention()),
    ({}, Retention()),
    (None, Retention()),
]


@pytest.mark.parametrize(("fields", "retention"), RETENTION)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_retention_arrives(served, path, fields, retention):
    assert sent(served, path, retention=fields, max_tokens=1).retention == retention


BAD_RETENTION = [
    ({"policy": "sinks", "sink_tokens": -1}, "retention.sink_tokens"),
    ({"policy": "sinks", "sink_tokens": 64, "window": 64}, "retention.sink_tokens"),
    ({"policy": "sinks", "sink_tokens": 65, "window": 64}, "retention.sink_tokens"),
    ({"policy": "sinks", "window": 0}, "retention.window"),
    ({"policy": "sinks", "window": -5}, "retention.window"),
    ({"policy": "sinks", "window": 15}, "retention.window"),
    ({"policy": "sinks", "window": 1021}, "retention.window"),
    ({"policy": "sinks", "window": 10**9}, "retention.window"),
    ({"policy": "sinks", "window": 2**70}, "retention.window"),
    ({"policy": "sinks", "window": "64"}, "retention.window"),
    ({"policy": "sinks", "window": 64.5}, "retention.window"),
    ({"policy": "sinks", "window": True}, "retention.window"),
    ({"policy": "sinks", "sink_tokens": 1.0}, "retention.sink_tokens"),
    ({"policy": "window", "sink_tokens": 4}, "retention.sink_tokens"),
    ({"policy": "none", "window": 64}, "retention.window"),
    ({"sink_tokens": 4}, "retention.sink_tokens"),
    ({"policy": "SINKS"}, "retention.policy"),
    ({"policy": 1}, "retention.policy"),
    ({"policy": "sinks", "sinks": 4}, "retention.sinks"),
    ("sinks", "retention"),
    (True, "retention"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_RETENTION)
def test_bad_retention_is_refused(served, fields, param):
    for path, body in ((COMPLETIONS, {"prompt": "Hi"}), (CHAT, {"messages": USER})):
        for stream in (False, True):
            assert error_of(served.post(path, {**body, "stream": stream, "retention": fields}))["param"] == param


def test_the_servers_own_policy_counts_where_a_request_names_none(serve):
    served = serve(settings={"retention": "sinks", "window": 200})
    assert sent(served).retention == Retention("sinks", 4, 200)
    assert sent(served, retention={"policy": "none"}).retention == Retention()
    assert sent(served, retention={"sink_tokens": 8}).retention == Retention("sinks", 8, 200)
    long = sent(served, prompt="a" * 5000)
    assert len(long.prompt) == 5000


def test_fifty_thousand_tokens_need_a_policy(served):
    error = error_of(served.post(COMPLETIONS, {"prompt": "a" * 50_000}))
    assert "50000" in error["message"]
    assert "sinks" in error["message"]
    assert len(sent(served, prompt="a" * 50_000, max_tokens=1, retention={"policy": "sinks"}).prompt) == 50_000


def test_a_policy_the_model_cannot_honour_says_why(serve):
    why = "its positions are a learned table"
    served = serve(engine={"num_blocks": 500})
    ready = served.pool.ready
    served.pool.ready = structs.replace(ready, policies=("none", "restart"), policy_refusals={"sinks": why})
    try:
        error = error_of(served.post(COMPLETIONS, {"prompt": "Hi", "retention": {"policy": "sinks"}}))
        assert why in error["message"]
        assert error["param"] == "retention.policy"
        assert error_of(served.post(COMPLETIONS, {"prompt": "Hi", "retention": {"policy": "window"}}))
        long = error_of(served.post(COMPLETIONS, {"prompt": "a" * 5000}))
        assert "sinks" not in long["message"]
    finally:
        served.pool.ready = ready


def test_a_window_the_cache_cannot_hold(serve):
    served = serve(engine={"num_blocks": 8})
    error = error_of(served.post(COMPLETIONS, {"prompt": "Hi", "retention": {"policy": "sinks", "window": 400}}))
    assert (error["param"], "8" in error["message"]) == ("retention.window", True)


def test_messages_become_the_templates_text(served):
    assert sent(served, CHAT, max_tokens=1).prompt == (256, *HI[3:].encode())
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "나"}]
    messages = [{"role": "developer", "content": "D"}, {"role": "user", "content": parts}]
    prompt = sent(served, CHAT, messages=messages, max_tokens=1).prompt
    assert bytes(prompt[1:]).decode() == "system: D\nuser: a나\nassistant: "
    assert prompt.count(256) == 1
    goes_on = [*USER, {"role": "assistant", "content": "I am "}]
    prompt = sent(served, CHAT, messages=goes_on, continue_final_message=True, max_tokens=1).prompt
    assert bytes(prompt[1:]).decode() == "user: Hi\nassistant: I am "
    prompt = sent(served, CHAT, add_generation_prompt=False, max_tokens=1).prompt
    assert bytes(prompt[1:]).decode() == "user: Hi\n"
    null = [*USER, {"role": "assistant", "content": None}, *USER]
    assert b"assistant: \n" in bytes(sent(served, CHAT, messages=null, max_tokens=1).prompt[1:])


def test_variables_of_the_template(serve, tokenizer):
    source = "{% if enable_thinking %}<think>{% else %}</think>{% endif %}{{ messages[0].content }}"
    served = serve(using=replace(tokenizer, chat_template=source))
    variables = {"enable_thinking": True}
    prompt = sent(served, CHAT, chat_template_kwargs=variables, max_tokens=1).prompt
    assert bytes(prompt) == b"<think>Hi"
    error = error_of(served.post(CHAT, {"messages": USER, "chat_template_kwargs": {"enable_thinkin": True}}))
    assert "enable_thinkin" in error["message"]


@pytest.mark.parametrize("opened", [False, True])
def test_thoughts_are_told_apart(serve, tokenizer, opened):
    source = "{{ messages[0].content }}<think>" if opened else "{{ messages[0].content }}{# </think> #}{{ '</think>' }}"
    script = tuple(b"Why?</think>\n\nBecause." if opened else b"<think>Why?</think>\n\nBecause.")
    served = serve(using=replace(tokenizer, chat_template=source + "{{ '</think>'[:0] }}"), script=script)
    message = served.chat(max_tokens=50)["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Because.", "reasoning_content": "Why?"}
    deltas = [c["delta"] for k in events(served.post(CHAT, {"messages": USER, "stream": True})) for c in k["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Why?"
    assert "".join(delta.get("content", "") for delta in deltas) == "Because."
    assert not any("reasoning_content" in delta and "content" in delta for delta in deltas[1:])


def test_stop_tokens_and_included_stops(serve):
    served = serve(script=tuple(b"one!two"))
    choice = served.complete(stop_token_ids=[ord("!")])["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one", "stop", ord("!"))
    choice = served.complete(stop_token_ids=[ord("!")], include_stop_str_in_output=True)["choices"][0]
    assert choice["text"] == "one!"
    choice = served.complete(stop=["!t"], include_stop_str_in_output=True)["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("one!t", "!t")
    answer = served.complete(stop=["!t"])
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("one", 5)
    at_once = served.complete(stop=["one!"], max_tokens=4)["choices"][0]
    assert (at_once["text"], at_once["finish_reason"]) == ("", "stop")


def test_special_tokens_are_hidden_or_shown(serve):
    served = serve(script=(65, 256, 66))
    assert served.complete()["choices"][0]["text"] == "AB"
    assert served.complete(skip_special_tokens=False)["choices"][0]["text"] == "A<s>B</s>"[:5]


def test_request_ids_are_taken_made_and_may_repeat(served):
    given = {"x-request-id": "mine-1"}
    for _ in range(2):
        answer = served.post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 1}, headers=given)
        assert answer.headers["x-request-id"] == "mine-1"
    answers = [served.post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 1}) for _ in range(2)]
    assert len({answer.headers["x-request-id"] for answer in answers}) == 2
    for bad in ("a b", "x" * 500, "<script>", "a\tb", "é"):
        answer = served.post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 1}, headers={"x-request-id": bad.encode()})
        assert answer.status_code == 200
        assert answer.headers["x-request-id"] not in (bad, "")
    assert served.post(COMPLETIONS, {"n": 0, "prompt": "x"}, headers=given).headers["x-request-id"] == "mine-1"


async def test_the_same_request_id_twice_at_once(serve):
    served = serve(delay=0.02)
    async with httpx.AsyncClient(base_url=served.url, timeout=20, verify=False) as http:
        asked = {"prompt": "Hi", "max_tokens": 8, "seed": 1}
        posts = [http.post(COMPLETIONS, json=asked, headers={"x-request-id": "twin"}) for _ in range(4)]
        answers = await asyncio.gather(*posts)
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
    assert len({answer.json()["id"] for answer in answers}) == 4


def test_prompt_logprobs(served):
    answer = served.complete(prompt="abc", prompt_logprobs=2, max_tokens=1)
    first, *others = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert others[0][str(ord("b"))] == {"logprob": -0.5, "rank": 1, "decoded_token": "b"}
    assert [len(place) for place in others] == [2, 2]
    assert "prompt_logprobs" not in served.complete(max_tokens=1)["choices"][0]
    chat = served.chat(prompt_logprobs=0, max_tokens=1)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    chunks = events(served.post(CHAT, {"messages": USER, "prompt_logprobs": 0, "max_tokens": 1, "stream": True}))
    assert [chunk.get("prompt_logprobs") for chunk in chunks if "prompt_logprobs" in chunk] == [chat["prompt_logprobs"]]


def test_watch_tells_the_blocks(served):
    retention = {"policy": "sinks", "window": 32}
    body = {"prompt": "Hi", "watch": True, "max_tokens": 60, "stream": True, "retention": retention}
    reports = [chunk["everstream"] for chunk in events(served.post(COMPLETIONS, body))]
    assert {(r["sinks"], r["window"], r["block_size"]) for r in reports} == {(4, 32, 16)}
    assert reports[-1]["evicted"] == 62 - 36
    assert reports[0]["blocks"] == [[0, 0, 1, 1]]
    assert served.chat(watch=True, max_tokens=1)["everstream"]["evicted"] == 0


def test_models(served):
    body = served.http.get("/v1/models").json()
    (model,) = body["data"]
    assert body["object"] == "list"
    assert (model["id"], model["object"], model["max_model_len"]) == ("fake", "model", 4096)
    assert served.http.get("/v1/models/fake").json() == model


def test_tokenize_and_detokenize(served):
    text = "Hé 🥹"
    body = served.post("/tokenize", {"prompt": text}).json()
    assert body["tokens"] == list(text.encode())
    assert (body["count"], body["max_model_len"]) == (len(text.encode()), 4096)
    for place, piece in enumerate(body["pieces"]):
        assert (piece["start"], piece["end"]) == (place, place + 1)
        assert bytes(piece["bytes"]) == text.encode()[place : place + 1]
    assert served.post("/detokenize", {"tokens": body["tokens"]}).json() == {"prompt": text}
    chat = served.post("/tokenize", {"messages": USER}).json()
    assert chat["tokens"] == [256, *HI[3:].encode()]
    assert (chat["pieces"][0]["start"], chat["pieces"][0]["end"], chat["pieces"][1]["start"]) == (0, 3, 3)
    assert (
        served.post("/detokenize", {"tokens": chat["tokens"], "skip_special_tokens": True}).json()["prompt"] == HI[3:]
    )
    assert served.post("/tokenize", {"prompt": ""}).json()["tokens"] == []
    assert served.post("/detokenize", {"tokens": [0xF0]}).json() == {"prompt": "\ufffd"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": USER}, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x", "foo": 1}, "foo"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [258]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens.0"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
    ],
)
def test_tokenize_refuses(served, path, body, param):
    assert error_of(served.post(path, body))["param"] == param


async def test_long_texts_do_not_hold_up_the_others(served):
    """While a long text is encoded, the health check answers in a fraction of that time."""
    text = "the quick brown fox " * 15_000
    async with httpx.AsyncClient(base_url=served.url, timeout=60, verify=False) as http:
        start = time.monotonic()
        long = asyncio.create_task(http.post("/tokenize", json={"prompt": text}))
        await asyncio.sleep(0.05)
        slowest = 0.0
        while not long.done():
            asked = time.monotonic()
            assert (await http.get("/health/live")).status_code == 200
            slowest = max(slowest, time.monotonic() - asked)
            await asyncio.sleep(0.01)
        whole = time.monotonic() - start
    assert (await long).json()["count"] == len(text)
    assert slowest < whole / 2, f"{slowest:.2f} s of {whole:.2f} s"


def test_the_openapi_page_documents_every_field(served):
    document = served.http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for name in (
        "CompletionRequest",
        "ChatRequest",
        "TokenizeRequest",
        "DetokenizeRequest",
        "Message",
        "RetentionFields",
    ):
        schema = schemas[name]
        assert schema["additionalProperties"] is False
        for field, properties in schema["properties"].items():
            assert properties.get("description") or "$ref" in str(properties), f"{name}.{field} has no description"
            assert "default" in properties or field in schema.get("required", ()), f"{name}.{field} has no default"
    temperature = schemas["CompletionRequest"]["properties"]["temperature"]
    assert (temperature["default"], temperature["anyOf"][0]["minimum"], temperature["anyOf"][0]["maximum"]) == (
        1.0,
        0,
        2,
    )
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        post = document["paths"][path]["post"]
        assert post["requestBody"]["content"]["application/json"]["schema"]["$ref"].split("/")[-1] in schemas
        assert {"200", "400", "413", "415", "503"} <= set(post["responses"])
    assert set(document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == {"text/plain"}
    references = set(_references(document))
    assert references
    assert all(reference.removeprefix("#/components/schemas/") in schemas for reference in references)


def _references(node):
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"]
        for value in node.values():
            yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)
