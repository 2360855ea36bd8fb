"""A tokenizer from a GGUF file's metadata: byte-level BPE, SentencePiece BPE, or SentencePiece unigram.

Knows the metadata keys under `tokenizer.`; does not know files, prompts or models. Nothing is guessed:
a kind of vocabulary that is not served is refused by name.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as pre

from app.text.pre_tokenizers import CUTS, byte_level

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "\u2581"  # how SentencePiece writes a space inside a token


def build(metadata: Mapping[str, Any]) -> Tokenizer:
    """A `tokenizers` pipeline equal to the one the model was trained with; raises ValueError, a clause."""
    kind = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe, "t5": _sentencepiece_unigram}
    if kind not in builders:
        raise ValueError(f"its vocabulary is of kind {kind!r}, and only {', '.join(builders)} are served")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ValueError("it holds no vocabulary (tokenizer.ggml.tokens)")
    types = _column(metadata, "token_type", len(tokens), _NORMAL)
    tokenizer = builders[kind](metadata, tokens, types)
    _add_whole_tokens(tokenizer, metadata, tokens, types)
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


def _sentencepiece_bpe(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    """SentencePiece BPE has no list of merges: a pair merges when its whole is a token, best score first."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if "tokenizer.ggml.merges" in metadata:
        merges = _merges(metadata)
    else:
        merges = _merges_from_scores(tokens, types, _column(metadata, "scores", len(tokens), 0.0))
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges,
            unk_token=tokens[unknown] if 0 <= unknown < len(tokens) else None,
            fuse_unk=True,
            byte_fallback=_BYTE in types,
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    tokenizer.decoder = _sentencepiece_decoder(prefix)
    return tokenizer


def _merges_from_scores(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, by the token's score, best first."""
    parts = {token for token, kind in zip(tokens, types, strict=True) if kind not in (_UNKNOWN, _CONTROL, _BYTE)}
    ranked = []
    for token, score in zip(tokens, scores, strict=True):
        if token in parts:
            for middle in range(1, len(token)):
                left, right = token[:middle], token[middle:]
                if left in parts and right in parts:
                    ranked.append((-score, left, right))
    ranked.sort(key=lambda merge: merge[0])
    return [(left, right) for _, left, right in ranked]


def _sentencepiece_unigram(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    scores = _column(metadata, "scores", len(tokens), 0.0)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.Unigram(list(zip(tokens, scores, strict=True)), unk_id=unknown, byte_fallback=_BYTE in types)
    )
    steps: list[normalizers.Normalizer] = []
    charsmap = bytes(value & 255 for value in metadata.get("tokenizer.ggml.precompiled_charsmap", ()))
    if charsmap:
        steps.append(normalizers.Precompiled(charsmap))
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces", False):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps += [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    # A token never holds a space but at its front, so cutting there loses nothing and bounds the search.
    tokenizer.pre_tokenizer = pre.Split(_SPACE, "merged_with_next")
    tokenizer.decoder = _sentencepiece_decoder(prefix)
    return tokenizer


def _sentencepiece_decoder(prefix: bool) -> decoders.Decoder:
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)


def _column(metadata: Mapping[str, Any], name: str, length: int, default: Any) -> Sequence[Any]:
    """One value a token, from the file or all alike."""
    values = metadata.get(f"tokenizer.ggml.{name}", [default] * length)
    if not isinstance(values, list) or len(values) != length:
        raise ValueError(f"its tokenizer.ggml.{name} does not have one value for each of its {length} tokens")
    return values


def _add_whole_tokens(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> None:
    """Tokens that are found whole in the text: control tokens are special, user-defined ones are not."""
    special = {number for number, kind in enumerate(types) if kind == _CONTROL}
    special |= {
        number
        for name in ("bos", "eos", "eot", "eom", "unknown")
        if isinstance(number := metadata.get(f"tokenizer.ggml.{name}_token_id"), int) and 0 <= number < len(tokens)
    }
    whole = special | {number for number, kind in enumerate(types) if kind == _USER_DEFINED}
    added = [
        AddedToken(tokens[number], normalized=False, special=number in special)
        for number in sorted(whole)
        if tokens[number]
    ]
    # One call: each call builds the matcher anew.
    tokenizer.add_tokens(added)


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
