"""Tokenizers from folders and GGUF metadata, where neither torch nor transformers is installed."""

import json
import struct
import time

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from app.text.tokenizer import TokenizerError, load_tokenizer

TEXT = "Hello, world! 안녕하세요 😀 12 345"


@pytest.fixture
def folder(tmp_path):
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<|turn|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT] * 5, trainer)
    backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    write(tmp_path / "config.json", {"eos_token_id": 1})
    return tmp_path


def write(path, value):
    path.write_text(json.dumps(value), encoding="utf-8")


def test_a_folder_round_trips(folder):
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert b"".join(map(tokenizer.token_bytes, ids)) == TEXT.encode()
    assert (tokenizer.bos_id, tokenizer.bos_token) == (0, "<s>")
    assert (tokenizer.eos_ids, tokenizer.eos_token) == ((1,), "</s>")
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.is_special(2)
    assert not tokenizer.is_special(3)


def test_special_tokens_are_found_whole_and_skipped_on_request(folder):
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("<|turn|>Hello</s>")
    assert (ids[0], ids[-1]) == (2, 1)
    assert tokenizer.decode(ids) == "Hello"
    assert tokenizer.decode(ids, skip_special=False) == "<|turn|>Hello</s>"
    assert tokenizer.token_bytes(2) == b"<|turn|>"
    assert tokenizer.piece(2) == "<|turn|>"


def test_offsets_are_characters(folder):
    ids, offsets = load_tokenizer(folder).encode_with_offsets("😀 안녕")
    assert len(ids) == len(offsets)
    assert offsets[0][0] == 0
    assert offsets[-1][1] == 4


def test_ids_that_no_token_has_are_empty(folder):
    tokenizer = load_tokenizer(folder)
    beyond = tokenizer.size + 7
    assert (tokenizer.piece(beyond), tokenizer.token_bytes(beyond)) == ("", b"")
    assert tokenizer.decode([beyond]) == ""
    assert len(tokenizer.all_token_bytes) == tokenizer.size


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (True, True), (False, False)])
def test_flags_of_the_configuration_say_what_is_added(folder, bos, eos):
    write(
        folder / "tokenizer_config.json",
        {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": bos, "add_eos_token": eos},
    )
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("Hello")
    assert ids == [0] * bos + tokenizer.encode("Hello", add_special=False) + [1] * eos


def test_a_post_processor_of_the_file_stays_where_the_configuration_is_silent(folder):
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder).encode("Hello")[0] == 0


def test_end_tokens_come_from_the_generation_configuration_first(folder):
    write(folder / "generation_config.json", {"eos_token_id": [2, 1]})
    assert load_tokenizer(folder).eos_ids == (2, 1)


def test_chat_templates_are_found_in_each_of_their_places(folder):
    assert load_tokenizer(folder).chat_template is None
    configuration = {
        "bos_token": "<s>",
        "chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}],
    }
    write(folder / "tokenizer_config.json", configuration)
    assert load_tokenizer(folder).chat_template == "d"
    write(folder / "tokenizer_config.json", {"chat_template": "plain"})
    assert load_tokenizer(folder).chat_template == "plain"
    (folder / "chat_template.jinja").write_text("own file")
    assert load_tokenizer(folder).chat_template == "own file"


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"model": {"type": "BPE"}}', b"\xff\xfe"])
def test_a_damaged_tokenizer_json_is_one_sentence(folder, damage):
    (folder / "tokenizer.json").write_bytes(damage)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read .*download it again\.$"):
        load_tokenizer(folder)


def test_a_damaged_configuration_is_one_sentence(folder):
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json cannot be read"):
        load_tokenizer(folder)


def string(text):
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def strings(values):
    return struct.pack("<IIQ", 9, 8, len(values)) + b"".join(map(string, values))


def numbers(code, number, values):
    return struct.pack("<IIQ", 9, number, len(values)) + struct.pack(f"<{len(values)}{code}", *values)


def write_gguf(path, **values):
    """A GGUF file of metadata alone."""
    rows = [string(f"tokenizer.{name.replace('__', '.')}") + value for name, value in values.items()]
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(rows)) + b"".join(rows))


def text_value(text):
    return struct.pack("<I", 8) + string(text)


def id_value(number):
    return struct.pack("<II", 4, number)


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SENTENCE_TOKENS = ["<unk>", "<s>", "</s>", *BYTES, "\u2581", "a", "b", "ab", "\u2581ab", "  ", "<new>"]
SPACE, AB = 3 + 256, 3 + 256 + 4
SENTENCE = {
    "ggml__model": text_value("llama"),
    "ggml__tokens": strings(SENTENCE_TOKENS),
    "ggml__scores": numbers("f", 6, [0.0] * SPACE + [-9, -9, -9, -1, -2, 0, -1000]),
    "ggml__token_type": numbers("i", 5, [2, 3, 3, *[6] * 256, 1, 1, 1, 1, 1, 4, 4]),
    "ggml__bos_token_id": id_value(1),
    "ggml__eos_token_id": id_value(2),
}


def spelled(text):
    return [3 + byte for byte in text.encode()]


def test_sentencepiece_metadata(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, **SENTENCE)
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("ab") == [1, AB]
    assert tokenizer.encode("ab ab", add_special=False) == [AB, AB]
    assert tokenizer.encode("가", add_special=False) == [SPACE, *spelled("가")]
    assert [tokenizer.token_bytes(token) for token in (spelled("가")[0], AB, 1)] == [b"\xea", b" ab", b"<s>"]
    assert tokenizer.decode([AB, SPACE, *spelled("가")]) == "ab 가"
    assert not tokenizer.byte_level
    assert not tokenizer.is_special(AB + 1)
    assert tokenizer.special_ids == {1, 2}


def test_each_stretch_between_special_tokens_gets_its_space(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, **SENTENCE)
    tokenizer = load_tokenizer(path)
    new = AB + 2
    assert tokenizer.encode("ab</s>ab<new>ab") == [1, AB, 2, AB, new, AB]
    assert tokenizer.encode("</s></s>", add_special=False) == [2, 2]
    assert tokenizer.decode([1, AB, 2, AB, new], skip_special=False) == "<s> ab</s> ab<new>"
    assert tokenizer.decode([1, AB, 2, AB, new]) == "ab ab<new>"
    write_gguf(path, **SENTENCE, ggml__add_space_prefix=struct.pack("<I?", 7, False))
    assert load_tokenizer(path).encode("ab</s>ab") == [1, AB - 1, 2, AB - 1]


def test_offsets_of_pieces_are_characters_and_added_ends_stand_nowhere(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, **SENTENCE)
    ids, offsets = load_tokenizer(path).encode_with_offsets("ab</s>가 ab")
    assert ids == [1, AB, 2, SPACE, *spelled("가"), AB]
    assert offsets == [(0, 0), (0, 2), (2, 6), (6, 6), (6, 7), (6, 7), (6, 7), (7, 10)]


def test_bytes_that_are_no_character_are_shown_and_ids_beyond_add_nothing(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, **SENTENCE)
    tokenizer = load_tokenizer(path)
    assert tokenizer.decode([AB, 3 + 0xFF, AB, 10_000]) == "ab\ufffd ab"
    assert (tokenizer.piece(10_000), tokenizer.token_bytes(10_000)) == ("", b"")
    assert len(tokenizer.all_token_bytes) == tokenizer.size == len(SENTENCE_TOKENS)


def test_spellings_that_stand_twice_or_are_empty_do_no_harm(tmp_path):
    tokens = [*SENTENCE_TOKENS[:-1], "", "\0", "", "a"]
    changed = {
        "ggml__tokens": strings(tokens),
        "ggml__scores": numbers("f", 6, [-1.0] * len(tokens)),
        "ggml__token_type": numbers("i", 5, [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - SPACE)]),
    }
    path = tmp_path / "model.gguf"
    write_gguf(path, **{**SENTENCE, **changed})
    assert load_tokenizer(path).encode("a", add_special=False) == [SPACE, len(tokens) - 1]


@pytest.mark.parametrize("length", [99, 100, 127, 128, 300])
def test_pieces_of_any_length_are_found(tmp_path, length):
    path = tmp_path / "model.gguf"
    write_gguf(path, **{**SENTENCE, "ggml__tokens": strings([*SENTENCE_TOKENS[:-2], "b" * length, "<new>"])})
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("b" * length, add_special=False) == [SPACE, AB + 1]
    assert tokenizer.decode([SPACE, AB + 1]) == "b" * length


def test_merges_that_the_file_states_count_before_scores(tmp_path):
    path = tmp_path / "model.gguf"
    merges = {"ggml__merges": strings(["\u2581 a", "a b"])}
    tokens = {"ggml__tokens": strings([*SENTENCE_TOKENS[:-2], "\u2581a", "<new>"])}
    write_gguf(path, **{**SENTENCE, **tokens, **merges})
    tokenizer = load_tokenizer(path)
    assert [tokenizer.piece(token) for token in tokenizer.encode("ab ab")] == ["<s>", *["\u2581a", "b"] * 2]
    assert tokenizer.decode(tokenizer.encode("ab ab가")) == "ab ab가"


HOSTILE = [
    "a" * 200_000, "ab" * 100_000, " " * 200_000, "\0" * 100_000, "</s>" * 50_000, "<" * 200_000, "\u0301" * 100_000,
    "가" * 100_000, "</s> " * 40_000, "\u2581" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_hostile_texts_cost_what_their_length_costs(tmp_path, kind):
    path = tmp_path / "model.gguf"
    write_gguf(path, **{**SENTENCE, "ggml__model": text_value(kind)})
    tokenizer = load_tokenizer(path)
    for text in HOSTILE:
        start = time.process_time()
        ids = tokenizer.encode(text, add_special=False)
        assert time.process_time() - start < 5, text[:10]
        assert len(ids) <= len(text.encode()) + 1
        assert tokenizer.decode(ids, skip_special=False).replace(" ", "") == text.replace(" ", "").replace("\u2581", "")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ggml__model": text_value("bert")}, "'bert'"),
        ({"ggml__tokens": id_value(3)}, "holds no vocabulary"),
        ({"ggml__token_type": numbers("i", 5, [1, 1])}, "one value for each of its 266 tokens"),
        ({"ggml__scores": numbers("f", 6, [1.0])}, "tokenizer.ggml.scores"),
        ({"ggml__token_type": numbers("i", 5, [2, 6, *[1] * 264])}, "it has 1 of the 256 tokens that stand for bytes"),
        ({"ggml__tokens": strings(["b" * 20_000, *SENTENCE_TOKENS[1:]])}, "piece is too long; convert the model again"),
        ({"ggml__precompiled_charsmap": numbers("B", 0, [255] * 9)}, "convert the model again"),
        ({"ggml__model": text_value("gpt2"), "ggml__pre": text_value("strange")}, "'strange' is not known"),
        ({"ggml__model": text_value("gpt2"), "ggml__merges": strings(["ab"])}, "'ab' is not a pair"),
        ({"ggml__model": text_value("gpt2"), "ggml__merges": strings(["a c"])}, "convert the model again"),
    ],
)
def test_vocabularies_that_cannot_be_used_are_one_sentence(tmp_path, changes, words):
    path = tmp_path / "model.gguf"
    write_gguf(path, **{**SENTENCE, **changes})
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(path)
    text = str(caught.value)
    assert words in text
    assert str(path) in text
    assert "\n" not in text


def test_a_file_that_is_no_gguf_is_one_sentence(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not a model")
    with pytest.raises(TokenizerError, match="not a GGUF file"):
        load_tokenizer(path)
