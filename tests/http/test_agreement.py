"""A property: for any text, chunking, stops and parameters, the stream and the whole answer agree in everything.

Both equal the reference decode of the ids, worked out here from the whole by other means than the server's: the
library's own decode, cut at the first stop in it, without a character that never became whole.
"""

import asyncio
from dataclasses import replace

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from app.main import create_app
from app.metrics import Metrics
from app.settings import Settings
from app.text.tokenizer import Tokenizer
from tests.fake_worker import FakePool
from tests.http.reading import events, joined, whole

EOS = 0
SAMPLE = "나는 밥을 먹었다. 🫠🥹龜 the quick brown fox\n\njumps over é and ß; ABCABD aaab aab ab"


def trained():
    """A byte-level vocabulary of merges, some of which cut through characters; id 0 ends, id 1 is another special."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["</s>", "<|x|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([SAMPLE] * 4, trainer)
    added = {0: "</s>", 1: "<|x|>"}
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    size = backend.get_vocab_size()
    return Tokenizer(backend, size, None, (EOS,), template, frozenset(added), byte_level=True, _added=added)


TOKENIZER = trained()


class Pool(FakePool):
    """A pool whose every wake makes as many steps as the next of `chunks` says, so that rows pile up unread."""

    chunks = (1,)

    async def run(self):
        turn = 0
        while True:
            self.wake.clear()
            if not self.engine.busy:
                await self.wake.wait()
            for _ in range(self.chunks[turn % len(self.chunks)]):
                if self.engine.busy:
                    self.step()
            turn += 1
            await asyncio.sleep(0)


class Stage:
    """One server in an event loop of its own, whose pretend engine speaks another script for each example."""

    def __init__(self):
        self.runner = asyncio.Runner()
        self.runner.run(self.start())

    async def start(self):
        self.pool = Pool(vocabulary=TOKENIZER.size, eos=EOS)
        self.app = create_app(Settings(), self.pool, TOKENIZER, Metrics(), model="fake")
        self.steps = asyncio.create_task(self.pool.run())
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://here")

    def agree(self, script, chunks, *more):
        self.pool.engine.behaviour = replace(self.pool.engine.behaviour, script=(*script, EOS))
        self.pool.chunks = chunks
        self.runner.run(agree(self.http, (*script, EOS), *more))

    async def stop(self):
        self.steps.cancel()
        await self.http.aclose()
        await self.app.state.chat_template.close()


@pytest.fixture(scope="module")
def stage():
    stage = Stage()
    yield stage
    stage.runner.run(stage.stop())
    stage.runner.close()


def expected(ids, stops, max_tokens, stop_ids, include, skip_special):
    """(text, ids delivered, finish_reason) by the rules, from the whole decode of ever longer outputs."""
    for count in range(1, min(len(ids), max_tokens) + 1):
        ended = ids[count - 1] in (EOS, *stop_ids)
        shown = count - 1 if ended and not include else count
        text = reference(ids[:shown], skip_special)
        found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
        if found:
            end, _, stop = min(found)
            return text[: end if include else end - len(stop)], count, "stop"
        if ended:
            return text, count, "stop"
    return reference(ids[:max_tokens], skip_special), max_tokens, "length"


def reference(ids, skip_special):
    """The library's decode, without the mark of an incomplete character at its end."""
    text = TOKENIZER.backend.decode(list(ids), skip_special_tokens=skip_special)
    data = b"".join(b"" if skip_special and i in TOKENIZER.special_ids else TOKENIZER.token_bytes(i) for i in ids)
    for length in (3, 2, 1):
        lead = data[-length:][:1]
        wants = 4 if lead >= b"\xf0" else 3 if lead >= b"\xe0" else 2
        if len(data) >= length and b"\xc2" <= lead <= b"\xf4" and length < wants:
            try:
                data[-length:].decode()
            except UnicodeDecodeError as error:
                if "unexpected end" in error.reason and error.start == 0:
                    return text[:-1]
    return text


def test_the_reference_itself():
    for text in (SAMPLE, "🥹"):
        ids = TOKENIZER.encode(text, add_special=False)
        assert reference(ids, True) == text
        for end in range(len(text.encode())):
            cut = [TOKENIZER.backend.token_to_id(p) for p in pre_tokenizers.ByteLevel.alphabet()]
            by_byte = {TOKENIZER.token_bytes(i): i for i in cut}
            ids = [by_byte[bytes([byte])] for byte in text.encode()[:end]]
            assert reference(ids, True) == text.encode()[:end].decode(errors="ignore")


texts = st.one_of(
    st.text(alphabet="나는밥🫠🥹龜éab \n", max_size=24),
    st.text(max_size=16),
    st.sampled_from([SAMPLE, SAMPLE[::-1], "aaab" * 5, "ABCABD" * 3]),
)
scripts = st.one_of(
    texts.map(lambda text: tuple(TOKENIZER.encode(text, add_special=False))),
    st.lists(st.integers(0, TOKENIZER.size - 1), max_size=40).map(tuple),
    st.lists(st.integers(2, 257), max_size=40).map(tuple),
)
PIECES = [
    "a",
    "ab",
    "aab",
    "ABD",
    "\n\n",
    "나",
    " 밥",
    "🥹",
    "x",
    "</s>",
    "the quick",
    "\ufffd",
    "brown fox\n\nj",
    "BC",
]
parameters = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 45),
        "stop": st.lists(st.sampled_from(PIECES), max_size=3, unique=True),
        "stop_token_ids": st.lists(st.integers(2, TOKENIZER.size - 1), max_size=1),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "n": st.sampled_from([1, 1, 2]),
        "seed": st.integers(-(2**63), 2**63 - 1),
    }
)
logprobs = st.sampled_from([None, 0, 2])
chunkings = st.lists(st.integers(1, 12), min_size=1, max_size=4).map(tuple)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(script=scripts, body=parameters, k=logprobs, chunks=chunkings, chat=st.booleans(), echo=st.booleans())
@pytest.mark.timeout(300)
def test_stream_and_whole_agree_with_the_reference_decode(stage, script, body, k, chunks, chat, echo):
    stage.agree(script, chunks, dict(body), k, chat, echo)


async def agree(http, ids, body, k, chat, echo):
    prompt = "Hé 나"
    if chat:
        path = "/v1/chat/completions"
        body |= {"messages": [{"role": "user", "content": prompt}]}
        body |= {"logprobs": True, "top_logprobs": k} if k is not None else {}
    else:
        path = "/v1/completions"
        body |= {"prompt": prompt, "logprobs": k, "echo": echo}
    answer = await http.post(path, json={**body, "trace": 1})
    assert answer.status_code == 200, answer.text
    options = {"stream": True, "stream_options": {"include_usage": True}, "trace": 1}
    streamed = await http.post(path, json={**body, **options})
    *parts, last = events(streamed)
    one, many = whole(answer.json(), chat), joined(parts, chat)
    assert many == one
    assert last["usage"] == answer.json()["usage"]
    assert parts[0]["seed"] == answer.json()["seed"] == body["seed"]
    prefix = prompt if echo and not chat else ""
    text, count, finish = expected(
        ids, body["stop"], body["max_tokens"], body["stop_token_ids"], body["include_stop_str_in_output"],
        body["skip_special_tokens"],
    )  # fmt: skip
    assert len(one) == body["n"]
    for choice in one:
        assert choice["text"] == prefix + text
        assert choice["finish"] == finish
        assert tuple(entry["id"] for entry in choice["trace"]) == ids[:count]
        if k is not None:
            told = choice["logprobs"]["content" if chat else "tokens"]
            assert len(told) == count + (len(TOKENIZER.encode(prompt)) if echo and not chat else 0)
    assert answer.json()["usage"]["completion_tokens"] == count * body["n"]
    if "\ufffd" not in text:
        assert not any("\ufffd" in str(c.get("text", c.get("delta"))) for part in parts for c in part["choices"])


def test_an_answer_of_no_tokens_at_all_agrees_too(stage):
    body = {"max_tokens": 5, "stop": [], "stop_token_ids": [], "include_stop_str_in_output": False}
    stage.agree((), (1,), {**body, "skip_special_tokens": True, "n": 2, "seed": 1}, 2, False, True)


def test_the_vocabulary_cuts_through_characters():
    """The property would say little if every token were whole characters."""
    broken = [i for i in range(258, TOKENIZER.size) if "\ufffd" in TOKENIZER.token_bytes(i).decode(errors="replace")]
    assert len(broken) > 5
