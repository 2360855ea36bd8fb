"""Texts so long that encoding them costs memory: refused before it where they can never fit, else one at a time."""

import asyncio
import json
import platform
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from app.api import prompts
from app.text.template_process import LONGEST_TEXT
from tests.http.reading import error_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SINKS = {"retention": {"policy": "sinks"}}


def chat(text):
    return {"messages": [{"role": "user", "content": text}]}


@pytest.fixture
def not_encoded(monkeypatch):
    """Fails the request where a long text is encoded."""

    def refuse(*_given):
        raise AssertionError("encoded")

    monkeypatch.setattr(prompts, "_encode_long", refuse)


@pytest.mark.usefixtures("not_encoded")
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [(COMPLETIONS, {"prompt": "a b " * 5000}, "prompt"), (CHAT, chat("a" * 20_000), "messages")],
)
def test_what_can_never_fit_is_refused_by_its_length(served, path, body, param):
    error = error_of(served.post(path, body))
    assert error["param"] == param
    assert error["code"] == "context_length_exceeded"
    for said in ("bytes of text, and the context has 4096 tokens of at most 4 bytes", '"policy": "sinks"'):
        assert said in error["message"]


@pytest.mark.usefixtures("not_encoded")
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": "a b " * (15 << 18), **SINKS}, "prompt"),
        (COMPLETIONS, {"prompt": ["x", "\u00e9" * (LONGEST_TEXT // 2 + 1)], **SINKS}, "prompt"),
        ("/tokenize", {"prompt": "a" * (LONGEST_TEXT + 1)}, "prompt"),
        ("/tokenize", {"prompt": "\u00e9" * (LONGEST_TEXT // 2 + 1)}, "prompt"),
        (CHAT, {**chat("a" * LONGEST_TEXT), **SINKS}, "messages"),
        ("/tokenize", chat("a" * LONGEST_TEXT), "messages"),
    ],
    ids=["completion", "list", "tokenize", "tokenize bytes", "chat", "tokenize chat"],
)
def test_no_policy_takes_texts_without_a_bound(served, path, body, param):
    start = time.monotonic()
    error = error_of(served.post(path, body))
    assert time.monotonic() - start < 5
    assert error["param"] == param
    assert str(LONGEST_TEXT) in error["message"], error


@pytest.mark.usefixtures("not_encoded")
def test_the_texts_of_one_request_have_a_bound_together(served):
    error = error_of(served.post(COMPLETIONS, {"prompt": ["a" * 1_000_000] * 5, **SINKS}))
    assert f"5000000 bytes together are over the limit of {4 * LONGEST_TEXT}" in error["message"]


def test_clients_that_leave_before_their_turn_are_not_encoded(serve, monkeypatch):
    served = serve()
    encode_long = prompts._encode_long
    running, most, calls = 0, 0, 0
    lock = threading.Lock()

    def slow(*given):
        nonlocal running, most, calls
        with lock:
            running, calls = running + 1, calls + 1
            most = max(most, running)
        time.sleep(1.5)
        with lock:
            running -= 1
        return encode_long(*given)

    monkeypatch.setattr(prompts, "_encode_long", slow)
    body = {"prompt": "a" * 100_000, "max_tokens": 1, **SINKS}

    async def leaves(http):
        with pytest.raises(httpx.ReadTimeout):
            await http.post(COMPLETIONS, json=body, timeout=0.8)

    async def crowd():
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as http:
            await asyncio.gather(*(leaves(http) for _ in range(8)))
            return await http.post(COMPLETIONS, json=body)

    answer = asyncio.run(crowd())
    assert answer.status_code == 200, answer.text
    assert (most, calls) == (1, 2)


MEASURE = """
import asyncio, json, resource, sys
from pathlib import Path
from app.api.prompts import encode
from app.text.tokenizer import load_tokenizer
from tests.tiny_text import byte_tokenizer

def megabytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20

async def main():
    tokenizer = byte_tokenizer(Path(sys.argv[1]))
    before = megabytes()
    tasks = [encode(tokenizer, ["a b " * (1 << 18)], False) for _ in range(4)]
    for task in asyncio.as_completed(tasks):
        assert len(await task) == 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(json.dumps([peak - before, megabytes() - before]))

asyncio.run(main())
"""


def test_four_megabytes_of_text_take_the_memory_of_one(tmp_path):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "model")]
    said = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    peak, left = json.loads(said)
    assert peak < 800, f"{peak} MB"
    if platform.libc_ver()[0] == "glibc":
        assert left < 150, f"{left} MB"


async def test_a_list_is_encoded_in_portions_each_text_for_itself(tokenizer, monkeypatch):
    texts = ["", "Hé 🥹" * 900, "x" * 3000, "나" * 4000, "", "y" * 20_000, "z"]
    alone = [tokenizer.encode(text) for text in texts]
    monkeypatch.setattr(prompts, "LONGEST_TEXT", 9000)
    assert await prompts.encode(tokenizer, texts, True) == alone


def test_the_longest_token_is_known_only_where_a_text_keeps_all_its_bytes(tokenizer):
    def longest(change):
        backend = Backend.from_str(tokenizer.backend.to_str())
        change(backend)
        return replace(tokenizer, backend=backend).longest_token

    def takes_spaces(backend):
        backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])

    def drops_spaces(backend):
        parts = [pre_tokenizers.WhitespaceSplit(), backend.pre_tokenizer]
        backend.pre_tokenizer = pre_tokenizers.Sequence(parts)

    assert longest(lambda backend: None) == 4  # </s>
    assert longest(lambda backend: setattr(backend, "normalizer", normalizers.NFC())) is None
    assert longest(takes_spaces) is None
    assert longest(drops_spaces) is None
