"""The cases where text matters, on the default model behind a real socket, held to the reference where there is one."""

import asyncio
import json
import random
import socket
import subprocess
import sys

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from app.text.tokenizer import load_tokenizer
from tests.http.reading import error_of, events, joined, whole
from tests.system.harness import Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ALPHABET = "Here is the English alphabet: ABC"
EMOJI = "🫠🥹龜 나는 밥을 먹었다"


@pytest.fixture(scope="module")
def server(default_model, tmp_path_factory):
    """The default model in float32, for all tests of this file."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "app", "serve", "--model", str(default_model), "--port", str(port)]
    with Server([*command, "--dtype=float32"], tmp_path_factory.mktemp("server"), port) as server:
        yield server


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=120, verify=False) as http:
        yield http


@pytest.fixture(scope="module")
def tokenizer(default_model):
    return load_tokenizer(default_model)


@pytest.fixture(scope="module")
def reference(default_model):
    """The model's tokenizer as `transformers` reads it."""
    return AutoTokenizer.from_pretrained(str(default_model.parent), gguf_file=default_model.name)


@pytest.fixture(autouse=True)
def quiet(server):
    """After each test nothing runs, waits or holds a block."""
    yield
    asyncio.run(server.quiet())


def complete(http, **body):
    answer = http.post(COMPLETIONS, json={"temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(http, path=COMPLETIONS, **body):
    return events(http.post(path, json={"temperature": 0, **body, "stream": True}))


def text_of(chunks):
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def test_the_alphabet_stops_before_its_stop(http):
    free = complete(http, prompt=ALPHABET, max_tokens=20)["choices"][0]["text"]
    assert free.startswith("DEFGHIJ")
    for stop in (["DEFGHIJ"], ["GHIJ"], ["HIJKL", "never"], free[3:9]):
        chunks = stream(http, prompt=ALPHABET, stop=stop, max_tokens=20)
        shown = text_of(chunks)
        ends = stop if isinstance(stop, list) else [stop]
        assert shown == free[: min(free.find(s) for s in ends if s in free)]
        assert complete(http, prompt=ALPHABET, stop=stop, max_tokens=20)["choices"][0]["text"] == shown
        assert joined(chunks, chat=False)[0]["finish"] == "stop"


def test_a_stop_that_never_completes_is_flushed(http):
    free = complete(http, prompt=ALPHABET, max_tokens=12)["choices"][0]["text"]
    stop = free[-6:] + "\x00never"
    chunks = stream(http, prompt=ALPHABET, stop=[stop], max_tokens=12)
    assert text_of(chunks) == free
    assert joined(chunks, chat=False)[0]["finish"] == "length"


def test_korean_and_emoji_have_no_broken_character(http, tokenizer):
    echoed = complete(http, prompt=EMOJI, echo=True, max_tokens=0)["choices"][0]["text"]
    assert echoed == EMOJI
    prompt = f"Repeat exactly.\n{EMOJI}\n{EMOJI}\n{EMOJI}\n"
    ids = tokenizer.encode(EMOJI, add_special=False)
    script = {"allowed_token_ids": sorted(set(ids)), "ignore_eos": True}
    for max_tokens in (1, 2, 3, 5, 8, 13, 21, 34):
        chunks = stream(http, prompt=prompt, max_tokens=max_tokens, seed=1, temperature=1.5, trace=1, **script)
        (choice,) = joined(chunks, chat=False)
        data = b"".join(tokenizer.token_bytes(entry["id"]) for entry in choice["trace"])
        assert len(choice["trace"]) == max_tokens
        assert choice["text"] == whole_text(data)
        body = {"prompt": prompt, "max_tokens": max_tokens, "seed": 1, "temperature": 1.5, **script}
        assert complete(http, **body)["choices"][0]["text"] == choice["text"]


def whole_text(data):
    """Bytes as text, invalid ones replaced, a beginning that could still become a character dropped."""
    for length in (1, 2, 3):
        try:
            data[-length:].decode()
        except UnicodeDecodeError as error:
            if "unexpected end" in error.reason and error.start == 0:
                return data[:-length].decode(errors="replace")
    return data.decode(errors="replace")


def test_echo_and_offsets(http):
    chunks = stream(http, prompt=EMOJI, echo=True, logprobs=1, max_tokens=6)
    (choice,) = joined(chunks, chat=False)
    told = choice["logprobs"]
    assert told["token_logprobs"][0] is None
    assert all(value <= 0 for value in told["token_logprobs"][1:])
    assert told["text_offset"] == sorted(told["text_offset"])
    assert choice["text"].startswith(EMOJI)
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)
    answer = complete(http, prompt=EMOJI, echo=True, logprobs=1, max_tokens=6)
    assert whole(answer, chat=False) == [choice]


def test_echoed_log_probabilities_are_those_of_generation(http):
    """What the model said of its own words is what it says of them as a prompt."""
    told = complete(http, prompt=ALPHABET, max_tokens=8, logprobs=0)["choices"][0]
    again = complete(http, prompt=ALPHABET + told["text"], echo=True, max_tokens=0, logprobs=0)["choices"][0]
    values = told["logprobs"]["token_logprobs"]
    assert again["logprobs"]["tokens"][-8:] == told["logprobs"]["tokens"]
    assert again["logprobs"]["token_logprobs"][-8:] == pytest.approx(values, abs=1e-4)


def test_chat_logprobs_without_candidates(http):
    body = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "max_tokens": 5}
    answer = http.post(CHAT, json={**body, "temperature": 0}).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[]] * 5
    assert "".join(entry["token"] for entry in content) == answer["choices"][0]["message"]["content"]


CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{EMOJI}\n  "}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c <|im_end|>"},
    ],
]


@pytest.mark.parametrize("messages", CHATS)
def test_prompts_equal_the_reference_template(http, reference, messages):
    """Row 29: as many tokens as the reference counts, so no begin token twice."""
    expected = reference.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert http.post("/tokenize", json={"messages": messages}).json()["tokens"] == expected
    answer = http.post(CHAT, json={"messages": messages, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == len(expected)
    text = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert http.post("/detokenize", json={"tokens": expected}).json()["prompt"] == text


def test_going_on_within_a_message_equals_the_reference(http, reference):
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two, "}]
    expected = reference.apply_chat_template(messages, tokenize=True, continue_final_message=True, return_dict=False)
    body = {"messages": messages, "continue_final_message": True}
    assert http.post("/tokenize", json=body).json()["tokens"] == expected


def test_limits_of_the_default_model(http, tokenizer):
    for ids in ([49152], [-1], [2**70], [999999999]):
        assert error_of(http.post(COMPLETIONS, json={"prompt": ids}))["param"] == "prompt"
    assert error_of(http.post(COMPLETIONS, json={"prompt": "x", "logit_bias": {"49152": 1}}))["param"] == "logit_bias"
    error = error_of(http.post(COMPLETIONS, json={"prompt": [5] * 50_000}))
    assert "8192" in error["message"]
    assert "sinks" in error["message"]
    assert complete(http, prompt="", max_tokens=2)["usage"]["prompt_tokens"] == 1
    banned = complete(http, prompt=ALPHABET, max_tokens=1, logprobs=0)["choices"][0]["logprobs"]["tokens"][0]
    (token,) = tokenizer.encode(banned, add_special=False)
    other = complete(http, prompt=ALPHABET, max_tokens=1, logit_bias={str(token): -100}, logprobs=0)
    assert other["choices"][0]["logprobs"]["tokens"][0] != banned


def test_a_long_prompt_streams_through_sinks(http):
    retention = {"policy": "sinks", "window": 64}
    answer = complete(http, prompt="the quick brown fox " * 100, max_tokens=20, retention=retention, ignore_eos=True)
    assert answer["usage"]["tokens_evicted"] > 300
    assert answer["usage"]["completion_tokens"] == 20


@pytest.mark.parametrize(
    ("policy", "length", "window"), [("sinks", 3000, 64), ("sinks", 4000, 128), ("window", 3000, 80)]
)
def test_a_cold_prompt_longer_than_its_replay(http, policy, length, window):
    """Only its end is computed, whose first tokens look back at what was never there; random ids: nothing is cached."""
    draw = random.Random(length)
    ids = [draw.randrange(1000, 40_000) for _ in range(length)]
    body = {"prompt": ids, "max_tokens": 3, "ignore_eos": True, "retention": {"policy": policy, "window": window}}
    answer = complete(http, **body)
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["usage"]["tokens_evicted"] > length - window - 40


def test_the_openai_client(server, tokenizer):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        name = client.models.list().data[0].id
        asked = {
            "model": name,
            "messages": [{"role": "user", "content": "Say hello."}],
            "temperature": 0,
            "max_tokens": 12,
        }
        answer = client.chat.completions.create(**asked)
        with client.chat.completions.create(**asked, stream=True) as chunks:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == answer.choices[0].message.content != ""
        plain = client.completions.create(model=name, prompt=ALPHABET, max_tokens=8, temperature=0)
        assert plain.choices[0].text.startswith("DEFGH")


LITELLM = """
import json, sys, litellm
asked = dict(model="openai/" + sys.argv[2], api_base=sys.argv[1] + "/v1", api_key="none", temperature=0, max_tokens=12,
             messages=[{"role": "user", "content": "Say hello."}])
answer = litellm.completion(**asked)
chunks = litellm.completion(**asked, stream=True, stream_options={"include_usage": True})
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
plain = litellm.text_completion(model="text-completion-openai/" + sys.argv[2], api_base=sys.argv[1] + "/v1",
                                api_key="none", prompt="Here is the English alphabet: ABC", max_tokens=8, temperature=0)
print(json.dumps([answer.choices[0].message.content, text, plain.choices[0].text, answer.usage.completion_tokens]))
"""


def test_litellm(server, http):
    """A process of its own: litellm changes the settings of other libraries when it is imported."""
    name = http.get("/v1/models").json()["data"][0]["id"]
    command = [sys.executable, "-c", LITELLM, server.url, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    whole_answer, streamed, plain, count = json.loads(done.stdout.splitlines()[-1])
    assert streamed == whole_answer != ""
    assert plain.startswith("DEFGH")
    assert count == 12 or count < 12


WORDS = ["a", "the", " of", "\n", ". ", "e", "in", "\n\n", "ing", " t", "and the", "나"]
SAID = ["the", "king", "of", "한국", "said", "🥹", "that", "no", "man", "is", "an", "island"]
bodies = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 24),
        "temperature": st.sampled_from([0, 0.7, 1.0, 1.6]),
        "top_p": st.sampled_from([1, 0.9]),
        "top_k": st.sampled_from([0, 40]),
        "min_p": st.sampled_from([0, 0.05]),
        "repetition_penalty": st.sampled_from([1, 1.2]),
        "presence_penalty": st.sampled_from([0, 0.5]),
        "stop": st.lists(st.sampled_from(WORDS), max_size=2, unique=True),
        "include_stop_str_in_output": st.booleans(),
        "n": st.sampled_from([1, 2]),
        "seed": st.integers(0, 2**53),
        "logprobs": st.sampled_from([None, 0, 3]),
        "echo": st.booleans(),
    }
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(body=bodies, start=st.integers(0, 100), length=st.integers(1, 60))
def test_stream_and_whole_agree_and_equal_the_decode_of_the_ids(http, tokenizer, body, start, length):
    words = random.Random(start).choices(SAID, k=length)
    asked = {"prompt": " ".join(words), **body, "trace": 1}
    answer = http.post(COMPLETIONS, json=asked)
    assert answer.status_code == 200, answer.text
    chunks = stream(http, **asked, stream_options={"include_usage": True})
    one = whole(answer.json(), chat=False)
    assert joined(chunks[:-1], chat=False) == one
    assert without_cache(chunks[-1]["usage"]) == without_cache(answer.json()["usage"])
    for choice in one:
        ids = [entry["id"] for entry in choice["trace"]]
        text = whole_text(b"".join(b"" if i in tokenizer.special_ids else tokenizer.token_bytes(i) for i in ids))
        shown = choice["text"].removeprefix(asked["prompt"]) if body["echo"] else choice["text"]
        if choice["stop"] in body["stop"]:
            end = text.index(choice["stop"])
            text = text[: end + len(choice["stop"])] if body["include_stop_str_in_output"] else text[:end]
        assert shown == text
    assert answer.json()["usage"]["completion_tokens"] == sum(len(choice["trace"]) for choice in one)


def without_cache(usage):
    """The second of two equal requests finds its prompt in the prefix cache: that count may differ."""
    return {name: value for name, value in usage.items() if name != "prompt_tokens_details"}
