"""Ids to text, byte by byte: whole characters only, invalid bytes shown at once, nothing stalls or raises."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from app.text.detokenizer import Detokenizer
from app.text.tokenizer import Tokenizer
from tests.tiny_text import byte_tokenizer

TEXTS = [
    "plain",
    "나는 밥을 먹었다",
    "🫠🥹龜",
    "👩‍👩‍👧‍👦 e\u0301 ﷽",
    "\x00\x7f\u0080\u07ff\u0800\uffff\U00010000\U0010ffff",
    "\ufffd",
]
INVALID = [
    *(bytes([byte]) for byte in (*range(0x80, 0xC2), *range(0xF5, 0x100))),  # never the start of a character
    b"\xe0\x80\x80", b"\xe0\x9f\xbf", b"\xf0\x80\x80\x80", b"\xf0\x8f\xbf\xbf",  # overlong
    b"\xed\xa0\x80", b"\xed\xbf\xbf",  # surrogates
    b"\xf4\x90\x80\x80", b"\xf4\xbf\xbf\xbf",  # beyond the last character
    b"\xc3A", b"\xe2\x82A", b"\xf0\x9f\xa5A", b"\xe2\x82\xe2\x82\xac", b"\xf0\x9f\xf0\x9f\xa5\xb9",  # cut short
    b"\xc3\xc3\xc3\xc3", b"\xf0\x9f\xa5" * 5, b"\x80" * 50, b"\xff" * 50,
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


def pushed(tokenizer, ids, skip_special=True):
    detokenizer = Detokenizer(tokenizer, skip_special)
    return [detokenizer.push(token) for token in ids] + [detokenizer.finish()]


def tail_length(data):
    """How many last bytes are the beginning of a character that never ended, worked out from the whole."""
    for length in (1, 2, 3):
        tail = data[-length:]
        if len(tail) == length and tail[0] >= 0xC2:
            try:
                data[-length:].decode()
            except UnicodeDecodeError as error:
                if error.reason == "unexpected end of data":
                    return length
    return 0


def whole(data):
    """What the bytes say: invalid ones as U+FFFD, an incomplete tail dropped."""
    return data[: len(data) - tail_length(data)].decode(errors="replace")


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_out_as_it_is_and_no_piece_is_broken(tokenizer, text):
    pieces = pushed(tokenizer, text.encode())
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)
    assert all(len(piece) <= 1 for piece in pieces)


@pytest.mark.parametrize("text", TEXTS[1:4])
def test_a_cut_in_mid_character_drops_the_incomplete_one(tokenizer, text):
    data = text.encode()
    for end in range(len(data)):
        pieces = pushed(tokenizer, data[:end])
        assert "".join(pieces) == data[:end].decode(errors="ignore")
        assert "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize("data", INVALID, ids=lambda data: data.hex()[:16])
def test_invalid_bytes_become_replacements_at_once(tokenizer, data):
    pieces = pushed(tokenizer, data + b"ok")
    assert "".join(pieces) == (data + b"ok").decode(errors="replace")
    assert pieces[-3].endswith("o")
    assert tokenizer.decode(list(data + b"ok")) == "".join(pieces)
    held = 0
    for byte, piece in zip(data, pieces, strict=False):
        held = 0 if piece else held + 1
        assert held <= 3, f"{byte:#x} is still held back"


def test_every_pair_and_every_lone_byte(tokenizer):
    for data in itertools.chain(([a] for a in range(256)), itertools.product(range(256), repeat=2)):
        assert "".join(pushed(tokenizer, data)) == whole(bytes(data))


@settings(max_examples=400, deadline=None)
@given(st.lists(st.one_of(st.integers(0x7E, 0xFF), st.integers(0, 255)), max_size=40))
def test_any_bytes_equal_the_whole_decode(tokenizer, ids):
    data = bytes(ids)
    assert "".join(pushed(tokenizer, ids)) == whole(data)
    assert tokenizer.decode(ids).startswith("".join(pushed(tokenizer, ids)))


def test_special_tokens_are_skipped_or_shown_and_do_not_part_a_character(tokenizer):
    euro = list("€".encode())
    assert "".join(pushed(tokenizer, [256, *euro[:2], 257, euro[2]])) == "€"
    assert "".join(pushed(tokenizer, [256, 65, 257], skip_special=False)) == "<s>A</s>"


def test_ids_that_no_token_has_add_nothing(tokenizer):
    assert "".join(pushed(tokenizer, [65, 5000, 66])) == "AB"


@pytest.fixture(scope="module")
def sentencepiece():
    """A vocabulary with byte fallback: `<0xEA>` and the like beside pieces with U+2581 for a space."""
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    vocabulary |= {"▁the": 257, "re": 258, "▁": 259}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return Tokenizer(backend=backend, size=260, byte_level=False)


def test_byte_fallback_spells_characters_and_keeps_the_space_between_prompt_and_answer(sentencepiece):
    ids = [257, 258, *(byte + 1 for byte in "나🥹".encode()), 257]
    pieces = pushed(sentencepiece, ids)
    assert "".join(pieces) == " there나🥹 the"
    assert sentencepiece.decode(ids) == "".join(pieces)[1:]  # a whole text of its own has no space before it
    assert "".join(pushed(sentencepiece, [0xF0 + 1, 257])) == "\ufffd the"
    assert "".join(pushed(sentencepiece, [257, 0xF0 + 1])) == " the"


def test_added_tokens_of_spaces_are_spaces(sentencepiece):
    backend = Backend.from_str(sentencepiece.backend.to_str())
    backend.add_tokens(["▁▁▁"])
    tokenizer = Tokenizer(backend=backend, size=261, byte_level=False, _added={260: "▁▁▁"})
    assert "".join(pushed(tokenizer, [257, 260, 258])) == " the   re"
    assert tokenizer.decode([257, 260, 258]) == "the   re"
