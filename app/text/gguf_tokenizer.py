"""A tokenizer from a GGUF file's metadata: byte-level BPE, SentencePiece BPE, or SentencePiece unigram.

Knows the metadata keys under `tokenizer.`; does not know files, prompts or models. Nothing is guessed:
a kind of vocabulary that is not served is refused by name.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from app.text.pre_tokenizers import CUTS, byte_level
from app.text.sentence_pieces import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    USER_DEFINED,
    Normalisation,
    SentencePieces,
    marks,
    model_of,
)

_ADDED_SCORE = -1000.0


def build(metadata: Mapping[str, Any]) -> Tokenizer | SentencePieces:
    """A pipeline equal to the one the model was trained with; raises ValueError, a clause."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama", "t5"):
        raise ValueError(f"its vocabulary is of kind {kind!r}, and only gpt2, llama, t5 are served")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ValueError("it holds no vocabulary (tokenizer.ggml.tokens)")
    types = _column(metadata, "token_type", len(tokens), NORMAL)
    stated = kind == "gpt2" or (kind == "llama" and "tokenizer.ggml.merges" in metadata)
    if not stated:
        return _sentence_pieces(metadata, tokens, types)
    tokenizer = (_byte_level_bpe if kind == "gpt2" else _merged_pieces)(metadata, tokens, types)
    # One call: each call builds the matcher anew.
    tokenizer.add_tokens(list(_whole_tokens(metadata, tokens, types).values()))
    _add_ends(tokenizer, metadata, tokens)
    return tokenizer


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether texts begin with the bos token: what the file says, else the habit of its kind of vocabulary."""
    cut = CUTS.get(str(metadata.get("tokenizer.ggml.pre")))
    habit = metadata.get("tokenizer.ggml.model") == "llama" or (cut is not None and cut.add_bos)
    return bool(metadata.get("tokenizer.ggml.add_bos_token", habit))


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    name = str(metadata.get("tokenizer.ggml.pre", "default"))
    cut = CUTS.get(name)
    if cut is None:
        raise ValueError(f"its pre-tokenizer {name!r} is not known; known are {', '.join(sorted(CUTS))}")
    merges = _merges(metadata)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=cut.whole_words))
    tokenizer.pre_tokenizer = byte_level(cut)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The file's merges; the space that parts a pair is never the first character."""
    pairs = []
    for merge in metadata.get("tokenizer.ggml.merges", ()):
        middle = str(merge).find(" ", 1)
        if middle < 0:
            raise ValueError(f"its merge {merge!r} is not a pair")
        pairs.append((merge[:middle], merge[middle + 1 :]))
    return pairs


def _merged_pieces(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    """BPE over pieces in sentencepiece's spelling whose merges the file states: its scores do not count then."""
    unknown = _unknown(metadata, tokens, types)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=_merges(metadata),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=BYTE in types,
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _sentence_pieces(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> SentencePieces:
    """The vocabulary as a model of the sentencepiece library, with the whole tokens in front of it."""
    num_bytes = sum(kind == BYTE for kind in types)
    if num_bytes not in (0, 256):
        raise ValueError(f"it has {num_bytes} of the 256 tokens that stand for bytes")
    scores = _column(metadata, "scores", len(tokens), 0.0)
    unknown = _unknown(metadata, tokens, types)
    # Tokens added after the training, to which converters give this score, were never sentencepiece's: they part a
    # text as special tokens do. Its own user-defined pieces it finds by itself.
    own = [NORMAL if kind == USER_DEFINED and scores[i] > _ADDED_SCORE else kind for i, kind in enumerate(types)]
    whole = _whole_tokens(metadata, tokens, own)
    spellings = [token.replace(" ", SPACE) for token in tokens]
    owner = {spelling: number for number, spelling in enumerate(spellings)}
    pieces = []
    for number, (spelling, score, kind) in enumerate(zip(spellings, scores, types, strict=True)):
        if not spelling or "\0" in spelling or owner[spelling] != number:
            # The library wants every spelling once, and none empty or with a zero. Of several the last is meant, as
            # in a table by spelling; the others get a name that no spelling has.
            pieces.append((f" {number}", score, UNKNOWN if number == unknown else CONTROL))
            continue
        if number == unknown:
            kind = UNKNOWN
        elif number in whole or kind == UNKNOWN:
            kind = CONTROL
        pieces.append((spelling, score, kind if NORMAL <= kind <= BYTE else NORMAL))
    normalisation = Normalisation(
        charsmap=bytes(value & 255 for value in metadata.get("tokenizer.ggml.precompiled_charsmap", ())),
        prefix=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
        remove_extra_spaces=bool(metadata.get("tokenizer.ggml.remove_extra_whitespaces", False)),
    )
    unigram = metadata["tokenizer.ggml.model"] == "t5"
    finder = marks(whole, len(tokens))
    _add_ends(finder, metadata, tokens)
    return SentencePieces(model_of(pieces, unigram, num_bytes == 256, normalisation), tokens, finder)


def _unknown(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> int:
    """The token that stands for what no other spells: the one named, else the one marked, else the first."""
    named = metadata.get("tokenizer.ggml.unknown_token_id")
    if isinstance(named, int) and 0 <= named < len(tokens):
        return named
    return next((number for number, kind in enumerate(types) if kind == UNKNOWN), 0)


def _column(metadata: Mapping[str, Any], name: str, length: int, default: Any) -> Sequence[Any]:
    """One value a token, from the file or all alike."""
    values = metadata.get(f"tokenizer.ggml.{name}", [default] * length)
    if not isinstance(values, list) or len(values) != length:
        raise ValueError(f"its tokenizer.ggml.{name} does not have one value for each of its {length} tokens")
    return values


def _whole_tokens(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> dict[int, AddedToken]:
    """Tokens that are found whole in the text: control tokens are special, user-defined ones are not."""
    special = {number for number, kind in enumerate(types) if kind == CONTROL}
    special |= {
        number
        for name in ("bos", "eos", "eot", "eom", "unknown")
        if isinstance(number := metadata.get(f"tokenizer.ggml.{name}_token_id"), int) and 0 <= number < len(tokens)
    }
    whole = special | {number for number, kind in enumerate(types) if kind == USER_DEFINED}
    return {
        number: AddedToken(tokens[number], normalized=False, special=number in special)
        for number in sorted(whole)
        if tokens[number]
    }


def _add_ends(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str]) -> None:
    """bos before and eos after a text, where the file asks for them."""
    wanted = {"bos": adds_bos(metadata), "eos": bool(metadata.get("tokenizer.ggml.add_eos_token", False))}
    ends: dict[str, tuple[str, int]] = {}
    for name in ("bos", "eos"):
        number = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if wanted[name] and isinstance(number, int) and 0 <= number < len(tokens):
            ends[name] = (tokens[number], number)
    if ends:
        before, after = ([ends[name][0]] if name in ends else [] for name in ("bos", "eos"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], special_tokens=list(ends.values())
        )
