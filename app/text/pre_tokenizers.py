"""How each named pre-tokenizer of a GGUF vocabulary cuts text before byte-level BPE merges it.

Knows names and patterns, nothing else. The names are those that GGUF files carry under
`tokenizer.ggml.pre`; the patterns are what the models' own tokenizer.json files say (llama.cpp's
`llama-vocab.cpp` lists both). Patterns of one entry apply one after the other, each to what the last left.
"""

from dataclasses import dataclass

from tokenizers import Regex
from tokenizers import pre_tokenizers as pre

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _SYMBOLS + _SPACES
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _SYMBOLS + _SPACES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD_CASED = r"[^\r\n\p{L}\p{N}]?" + _UPPER + "*" + _LOWER + "+"
_WORD_CAPITAL = r"[^\r\n\p{L}\p{N}]?" + _UPPER + "+" + _LOWER + "*"
_SYMBOLS_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = _WORD_CASED + "|" + _WORD_CAPITAL + r"|\p{N}" + _SYMBOLS_SLASH + _SPACES
_GPT4O = (
    _WORD_CASED + f"{_CONTRACTIONS}?|" + _WORD_CAPITAL + f"{_CONTRACTIONS}?" + r"|\p{N}{1,3}" + _SYMBOLS_SLASH + _SPACES
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_DEEPSEEK_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
)
_HAN_KANA = r"[一-龥぀-ゟ゠-ヿ]+"


@dataclass(frozen=True)
class Cut:
    """The patterns of one pre-tokenizer. `whole_words`: a piece that is itself a token skips the merges."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


_GROUPS: tuple[tuple[str, Cut], ...] = (
    ("default", Cut((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
    ("gpt-2 mpt olmo jais trillion exaone4 phi-2 gigachat a.x-4.0 mellum granite-docling", Cut((_GPT2,))),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b", Cut((r"\p{N}", _GPT2))),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        Cut((_LLAMA3,), whole_words=True, add_bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe glm4", Cut((_LLAMA3,))),
    ("qwen2 deepseek-r1-qwen stablelm2 hunyuan megrez kormo grok-2 solar-open", Cut((_QWEN2,))),
    ("tekken", Cut((_TEKKEN,), whole_words=True, add_bos=True)),
    ("gpt-4o llama4 kanana2 minimax-m2", Cut((_GPT4O,))),
    ("falcon", Cut((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))),
    ("bloom poro-chat gpt3-finnish", Cut((_BLOOM,))),
    ("viking", Cut((_BLOOM, r"\p{N}"))),
    ("deepseek-coder", Cut((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"))),
    ("deepseek-v3 hunyuan-dense", Cut((r"\p{N}{1,3}", _HAN_KANA, _DEEPSEEK_WORDS + _SPACES))),
)

CUTS: dict[str, Cut] = {name: cut for names, cut in _GROUPS for name in names.split()}


def byte_level(cut: Cut) -> pre.PreTokenizer:
    """The cut, then each piece spelled in GPT-2's alphabet of 256 printable characters, one a byte."""
    steps: list[pre.PreTokenizer] = [pre.Split(Regex(pattern), "isolated") for pattern in cut.patterns]
    return pre.Sequence([*steps, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
