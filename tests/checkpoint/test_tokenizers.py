"""Tokenizers built from GGUF metadata and folders equal their references on 1,000 strings of many scripts.

References: for byte-level BPE, transformers' own conversion of the same GGUF file, or (where that does not know
the pre-tokenizer) the pipeline that the model's published tokenizer.json states; for SentencePiece, the
`sentencepiece` library itself.
"""

import io
import json

import gguf
import pytest
import sentencepiece
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from app.text.pre_tokenizers import CUTS
from app.text.tokenizer import TokenizerError, load_tokenizer
from tests.checkpoint import tiny_gguf
from tests.checkpoint.many_scripts import strings

TEXTS = strings(1000, seed=4)
CORPUS = strings(3000, seed=5)
USER_DEFINED = ["<think>", "\u2581\u2581", "\u2581\u2581\u2581", "the"]
SPECIALS = ["<|begin|>", "<|end|>", "<|turn|>"]

# Pre-tokenizers that transformers' conversion leaves out, as the models' tokenizer.json files have them.
PUBLISHED = {
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "falcon": [
        pre_tokenizers.Punctuation("contiguous"),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.Digits(individual_digits=False),
        pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
    ],
    "bloom": [
        pre_tokenizers.Split(Regex(r" ?[^(\s|[.,!?…。，、।۔،])]+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}


def train_byte_level(pre_tokenizer, size=1200):
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def write_byte_level(path, tokenizer, pre, **flags):
    """The trained vocabulary as a GGUF file without tensors."""
    state = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIALS else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in state["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(2)
    for name, value in flags.items():
        getattr(writer, f"add_{name}")(value)
    tiny_gguf.finish(writer)


def mixed_with_specials(texts):
    return [
        text if i % 3 else f"{SPECIALS[0]}{text[:7]}{SPECIALS[2]} {text[7:]}{SPECIALS[1]}"
        for i, text in enumerate(texts)
    ]


def assert_equal(ours, reference, texts):
    for text in texts:
        expected = reference.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special=False) == expected, repr(text)
        assert ours.decode(expected, skip_special=False) == reference.decode(expected, skip_special_tokens=False)


def transformers_reference(path):
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken", "gpt-4o", "dbrx", "deepseek-r1-qwen"])
def test_byte_level_vocabularies_equal_transformers(tmp_path, pre):
    path = tmp_path / "model.gguf"
    trained = train_byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    write_byte_level(path, trained, pre)
    assert_equal(load_tokenizer(path), transformers_reference(path), mixed_with_specials(TEXTS))


@pytest.mark.parametrize("pre", sorted(PUBLISHED))
def test_byte_level_vocabularies_equal_the_published_pipeline(tmp_path, pre):
    path = tmp_path / "model.gguf"
    trained = train_byte_level(pre_tokenizers.Sequence(PUBLISHED[pre]))
    write_byte_level(path, trained, pre)
    ours = load_tokenizer(path)
    for text in mixed_with_specials(TEXTS):
        assert ours.encode(text, add_special=False) == trained.encode(text, add_special_tokens=False).ids, repr(text)


def test_every_pre_tokenizer_keeps_every_byte(tmp_path):
    path = tmp_path / "model.gguf"
    trained = train_byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), size=600)
    for pre in CUTS:
        write_byte_level(path, trained, pre)
        ours = load_tokenizer(path)
        for text in TEXTS[:200]:
            ids = ours.encode(text, add_special=False)
            assert b"".join(map(ours.token_bytes, ids)) == text.encode(), pre
            assert ours.decode(ids) == text


def test_the_default_model_equals_its_published_pipeline(default_model):
    reference = transformers_reference(default_model)
    # transformers does not know this file's pre-tokenizer; the model's tokenizer.json has these two steps.
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(PUBLISHED["smollm"])
    ours = load_tokenizer(default_model)
    texts = [text if i % 4 else f"<|im_start|>user\n{text}<|im_end|>\n" for i, text in enumerate(TEXTS)]
    assert_equal(ours, reference, texts)
    assert (ours.size, ours.bos_id, ours.eos_ids) == (49152, 1, (2,))
    assert ours.encode("hi") == ours.encode("hi", add_special=False)
    assert ours.chat_template == reference.chat_template


def train_sentencepiece(kind, **options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text.replace("\0", "") for text in CORPUS if text.strip()]),
        model_writer=model,
        model_type=kind,
        vocab_size=4000,
        character_coverage=0.98,
        hard_vocab_limit=False,
        minloglevel=2,
        max_sentence_length=10_000,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()), model.getvalue()


def write_sentencepiece(path, processor, model, charsmap=b"", user_defined=(), added=False, **flags):
    """The trained vocabulary as a GGUF file without tensors, as the converters write it."""
    size = processor.vocab_size()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    types = [piece_type(processor, number, user_defined) for number in range(size)]
    pieces = [processor.id_to_piece(number) for number in range(size)]
    # Converters write user-defined pieces as they stand in a text.
    writer.add_token_list([p.replace("\u2581", " ") if t == 4 else p for p, t in zip(pieces, types, strict=True)])
    # To tokens that were added after the training they give a score of their own.
    scores = [-1000.0 if added and types[number] == 4 else processor.get_score(number) for number in range(size)]
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_unk_token_id(processor.unk_id())
    writer.add_bos_token_id(processor.bos_id())
    writer.add_eos_token_id(processor.eos_id())
    if charsmap:
        writer.add_precompiled_charsmap(charsmap)
    for name, value in flags.items():
        getattr(writer, f"add_{name}")(value)
    tiny_gguf.finish(writer)


def piece_type(processor, number, user_defined):
    if processor.is_unknown(number):
        return 2
    if processor.is_control(number):
        return 3
    if processor.id_to_piece(number) in user_defined:
        return 4
    return 6 if processor.is_byte(number) else 1


def charsmap_of(model):
    """NormalizerSpec.precompiled_charsmap out of a sentencepiece model (field 2 of field 3), without its schema."""

    def fields(data):
        place = 0
        while place < len(data):
            key, place = varint(data, place)
            if key & 7 == 2:
                length, place = varint(data, place)
                yield key >> 3, data[place : place + length]
                place += length
            elif key & 7 == 0:
                _, place = varint(data, place)
            else:
                place += {1: 8, 5: 4}[key & 7]

    def varint(data, place):
        value = shift = 0
        while True:
            byte = data[place]
            value, shift, place = value | (byte & 127) << shift, shift + 7, place + 1
            if byte < 128:
                return value, place

    normaliser = next(value for number, value in fields(model) if number == 3)
    return next((value for number, value in fields(normaliser) if number == 2), b"")


def assert_equals_sentencepiece(ours, processor, texts):
    """Equal ids and equal texts; what the vocabulary cannot spell is a sign there and a special token here."""
    for text in texts:
        expected = processor.encode(text)
        assert ours.encode(text, add_special=False) == expected, repr(text)
        ids, offsets = ours.encode_with_offsets(text, add_special=False)
        assert ids == expected
        assert all(0 <= start <= end <= len(text) for start, end in offsets)
        if processor.unk_id() not in expected:
            assert ours.decode(expected) == processor.decode(expected)


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("byte_fallback", [True, False])
@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc", "nmt_nfkc_cf"])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece_vocabularies_equal_sentencepiece(tmp_path, kind, rule, byte_fallback, prefix):
    processor, model = train_sentencepiece(
        kind,
        byte_fallback=byte_fallback,
        add_dummy_prefix=prefix,
        normalization_rule_name=rule,
        remove_extra_whitespaces=rule != "identity",
    )
    path = tmp_path / "model.gguf"
    write_sentencepiece(
        path,
        processor,
        "llama" if kind == "bpe" else "t5",
        charsmap=charsmap_of(model),
        add_space_prefix=prefix,
        remove_extra_whitespaces=rule != "identity",
    )
    ours = load_tokenizer(path)
    assert_equals_sentencepiece(ours, processor, TEXTS)
    assert (ours.encode("a")[0] == processor.bos_id()) == (kind == "bpe")
    if rule == "identity" and byte_fallback:
        assert [ours.decode(ours.encode(text)) for text in TEXTS] == [text.replace("\u2581", " ") for text in TEXTS]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("prefix", [True, False])
def test_user_defined_pieces_are_found_as_sentencepiece_finds_them(tmp_path, kind, prefix):
    processor, model = train_sentencepiece(
        kind,
        byte_fallback=True,
        add_dummy_prefix=prefix,
        normalization_rule_name="nmt_nfkc",
        remove_extra_whitespaces=False,
        user_defined_symbols=USER_DEFINED,
    )
    path = tmp_path / "model.gguf"
    write_sentencepiece(
        path,
        processor,
        "llama" if kind == "bpe" else "t5",
        charsmap=charsmap_of(model),
        user_defined=USER_DEFINED,
        add_space_prefix=prefix,
    )
    texts = [text[:9] + "<think>" + text[9:] for text in TEXTS]
    assert_equals_sentencepiece(load_tokenizer(path), processor, texts)


def test_pieces_declared_after_the_training_are_found_whole_like_gemmas(tmp_path):
    processor, _ = train_sentencepiece(
        "bpe",
        byte_fallback=True,
        add_dummy_prefix=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=USER_DEFINED,
    )
    path = tmp_path / "model.gguf"
    write_sentencepiece(path, processor, "llama", user_defined=USER_DEFINED, added=True, add_space_prefix=False)
    # A literal U+2581 is a space to sentencepiece; a text with both is nobody's.
    texts = [text[:9] + "<think>" + text[9:] for text in TEXTS if "\u2581" not in text]
    assert_equals_sentencepiece(load_tokenizer(path), processor, texts)


def model_folder(folder, model, **config):
    (folder / "tokenizer.model").write_bytes(model)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_tokenizer_model_is_read_as_it_is(tmp_path, kind):
    processor, model = train_sentencepiece(kind, byte_fallback=True, normalization_rule_name="nmt_nfkc")
    added = {"4000": {"content": "<|turn|>", "special": True}, "4001": {"content": "<new>", "rstrip": True}}
    config = {"tokenizer_class": "LlamaTokenizer", "added_tokens_decoder": added}
    ours = load_tokenizer(model_folder(tmp_path, model, **config))
    assert_equals_sentencepiece(ours, processor, TEXTS)
    assert not (tmp_path / "tokenizer.json").exists()
    assert (ours.bos_id, ours.eos_ids, ours.size) == (processor.bos_id(), (processor.eos_id(),), 4002)
    assert ours.encode("a") == [processor.bos_id(), *processor.encode("a")]
    assert ours.encode("<|turn|>a<new>  a", add_special=False) == [
        4000,
        *processor.encode("a"),
        4001,
        *processor.encode("a"),
    ]
    assert ours.special_ids == {0, 1, 2, 4000}
    config |= {"legacy": False, "add_bos_token": False, "add_eos_token": True}
    ours = load_tokenizer(model_folder(tmp_path, model, **config))
    assert [ours.token_bytes(token) for token in ours.encode("a<|turn|>a")] == [b" a", b"<|turn|>", b"a", b"</s>"]


@pytest.mark.parametrize("content", [b"", b"IQ== 0\nIg== x\n", b"\n\x0e\n\x05<unk>\x15"])
def test_a_tokenizer_model_that_is_damaged_is_one_sentence(tmp_path, content):
    with pytest.raises(TokenizerError, match=r"tokenizer\.model cannot be read .*download it again") as caught:
        load_tokenizer(model_folder(tmp_path, content))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "tokenizer.json").exists()


def test_a_folder_without_tokenizer_json_is_converted_by_a_process(tmp_path):
    trained = train_byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), size=400)
    trained.model.save(str(tmp_path))  # vocab.json and merges.txt
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "eos_token_id": 1}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": SPECIALS[1], "bos_token": SPECIALS[0]})
    )
    ours = load_tokenizer(tmp_path)
    assert (tmp_path / "tokenizer.json").exists()
    assert_equal(ours, AutoTokenizer.from_pretrained(tmp_path), TEXTS[:200])


def test_a_folder_without_any_tokenizer_is_one_sentence(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
