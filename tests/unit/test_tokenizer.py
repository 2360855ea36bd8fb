"""Tokenizers from folders and GGUF metadata, where neither torch nor transformers is installed."""

import json
import struct

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


SENTENCE_TOKENS = ["<unk>", "<s>", "</s>", "<0xEA>", "<0xB0>", "<0x80>", "\u2581", "a", "b", "ab", "\u2581ab", "  "]
SENTENCE = {
    "ggml__model": text_value("llama"),
    "ggml__tokens": strings(SENTENCE_TOKENS),
    "ggml__scores": numbers("f", 6, [0, 0, 0, 0, 0, 0, -9, -9, -9, -1, -2, 0]),
    "ggml__token_type": numbers("i", 5, [2, 3, 3, 6, 6, 6, 1, 1, 1, 1, 1, 4]),
    "ggml__bos_token_id": id_value(1),
    "ggml__eos_token_id": id_value(2),
}


def test_sentencepiece_metadata(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, **SENTENCE)
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("ab") == [1, 10]
    assert tokenizer.encode("ab ab", add_special=False) == [10, 10]
    assert tokenizer.encode("가", add_special=False) == [6, 3, 4, 5]
    assert [tokenizer.token_bytes(token) for token in (3, 10, 1)] == [b"\xea", b" ab", b"<s>"]
    assert tokenizer.decode([10, 6, 3, 4, 5]) == "ab 가"
    assert not tokenizer.byte_level
    assert 11 in tokenizer.encode("a  b", add_special=False)
    assert not tokenizer.is_special(11)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ggml__model": text_value("bert")}, "'bert'"),
        ({"ggml__tokens": id_value(3)}, "holds no vocabulary"),
        ({"ggml__token_type": numbers("i", 5, [1, 1])}, "one value for each of its 12 tokens"),
        ({"ggml__scores": numbers("f", 6, [1.0])}, "tokenizer.ggml.scores"),
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
