"""Vocabularies of the `sentencepiece` library, encoded by that library itself.

Knows how special tokens part a text, what a piece spells, and the few fields of sentencepiece's model format
(`sentencepiece_model.proto`) that a vocabulary fills; does not know where a vocabulary was read. `SentencePieces`
has the methods of `tokenizers.Tokenizer` that are called here, so both serve as a tokenizer's backend.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, Tokenizer, models

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # SentencePiece.Type, and GGUF's token types
SPACE = "\u2581"  # how sentencepiece writes a space inside a piece

# NormalizerSpec with add_dummy_prefix = false; behind a model, the last value of a field counts.
_NO_PREFIX = b"\x1a\x02\x18\x00"


def piece_bytes(piece: str) -> bytes:
    """What a piece spells inside a text: `<0xEA>` is one byte, U+2581 a space."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            return piece.encode()
    return piece.replace(SPACE, " ").encode()


@dataclass(frozen=True)
class Normalisation:
    """What happens to a text before it is cut. `charsmap`: sentencepiece's compiled table, empty for none."""

    charsmap: bytes = b""
    prefix: bool = True
    remove_extra_spaces: bool = False


def model_of(
    pieces: Sequence[tuple[str, float, int]], unigram: bool, byte_fallback: bool, normalisation: Normalisation
) -> bytes:
    """A sentencepiece model of (spelling, score, type) in order of ids; one of them must be of type UNKNOWN."""
    body = bytearray()
    rest = struct.Struct("<sfsB").pack  # fields 2 and 3: score, type
    for spelling, score, kind in pieces:
        data = spelling.encode()
        if len(data) < 100:  # two bytes of length: half the time of a large vocabulary
            body += b"\n%c\n%c%b%b" % (len(data) + 9, len(data), data, rest(b"\x15", score, b"\x18", kind))
        else:
            body += _field(1, _field(1, data) + rest(b"\x15", score, b"\x18", kind))
    unknown = next(number for number, (_, _, kind) in enumerate(pieces) if kind == UNKNOWN)
    trainer = {3: 1 if unigram else 2, 35: int(byte_fallback), 40: unknown}
    normaliser = {3: int(normalisation.prefix), 4: int(normalisation.remove_extra_spaces), 5: 1}
    body += _field(2, b"".join(_varint(number << 3) + _varint(value) for number, value in trainer.items()))
    charsmap = _field(2, normalisation.charsmap) if normalisation.charsmap else b""
    flags = b"".join(_varint(number << 3) + _varint(value) for number, value in normaliser.items())
    return bytes(body + _field(3, charsmap + flags))


def _field(number: int, content: bytes) -> bytes:
    """A field of bytes, as protobuf writes it: key, length, content."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    if value < 128:
        return bytes((value,))
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def marks(tokens: Mapping[int, AddedToken], size: int) -> Tokenizer:
    """A pipeline that finds whole tokens in a text, longest first, and calls each stretch between them id `size`."""
    vocabulary = {token.content: number for number, token in tokens.items()}
    finder = Tokenizer(models.WordLevel(vocabulary | {"": size}, unk_token=""))
    # One call: each call builds the matcher anew.
    finder.add_tokens([tokens[number] for number in sorted(tokens)])
    return finder


class Encoding:
    """One text's ids, and for each where it stands in characters; tokens that were only added stand at (0, 0)."""

    def __init__(self, pieces: "SentencePieces", text: str, found: Sequence[tuple[int, int, int]]) -> None:
        self._pieces, self._text, self._found = pieces, text, found
        self.ids = list(pieces.ids_of(text, found))

    @cached_property
    def offsets(self) -> list[tuple[int, int]]:
        """Worked out when asked for; the bytes of one character all stand where it stands."""
        return list(self._pieces.offsets_of(self._text, self._found))


class SentencePieces:
    """A sentencepiece model and the tokens that are found whole before it sees a text; safe to call from threads.

    `model`: the bytes of a sentencepiece model. `tokens`: the spelling of every id. `finder`: what `marks` gave.
    Where the model puts a space before a text, every stretch between special tokens gets one, as in llama.cpp and
    in transformers' `legacy` tokenizers; with `one_prefix` only a stretch that begins the text, as in their others.
    Raises RuntimeError where sentencepiece refuses the model.
    """

    def __init__(self, model: bytes, tokens: Sequence[str], finder: Tokenizer, one_prefix: bool = False) -> None:
        self._first = SentencePieceProcessor(model_proto=model)
        self._later = SentencePieceProcessor(model_proto=model + _NO_PREFIX) if one_prefix else self._first
        self._prefixed = str(self._first.normalize("a")).startswith(SPACE)
        self.tokens, self.finder = tokens, finder
        self._special = {number for number, token in finder.get_added_tokens_decoder().items() if token.special}

    @property
    def bos(self) -> str | None:
        """What the model itself calls the token that begins a text, if it has one."""
        return self.id_to_token(self._first.bos_id())

    @property
    def eos(self) -> str | None:
        """The one that ends it."""
        return self.id_to_token(self._first.eos_id())

    def encode(self, text: str, add_special_tokens: bool = True) -> Encoding:
        """Whole tokens first, then sentencepiece on what stands between them."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[Encoding]:
        """Each text for itself; lets go of the interpreter's lock while it works."""
        found = self.finder.encode_batch(texts, add_special_tokens=add_special_tokens)
        return [
            Encoding(self, text, [(token, *span) for token, span in zip(one.ids, one.offsets, strict=True)])
            for text, one in zip(texts, found, strict=True)
        ]

    def ids_of(self, text: str, found: Sequence[tuple[int, int, int]]) -> Iterator[int]:
        """The ids of a text whose whole tokens were found."""
        for token, start, end in found:
            if token < len(self.tokens):
                yield token
            else:
                yield from self._processor(start).encode(text[start:end], out_type=int)

    def offsets_of(self, text: str, found: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
        """Where each of those ids stands."""
        for token, start, end in found:
            if token < len(self.tokens):
                yield start, end
            else:
                cut = self._processor(start).encode(text[start:end], out_type="offset_mapping")
                for first, last in self._whole_characters(cut["ids"], cut["offsets"]):
                    yield start + first, start + last

    def _processor(self, start: int) -> SentencePieceProcessor:
        return self._later if start else self._first

    def _whole_characters(self, ids: Sequence[int], offsets: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The library lets only the last byte of a character span it; here each of them does."""
        for place in range(len(ids) - 2, -1, -1):
            start, end = offsets[place]
            if start == end and self._first.is_byte(ids[place]) and self._first.is_byte(ids[place + 1]):
                offsets[place] = (start, offsets[place + 1][1])
        return offsets

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text, without the space that was put before it; bytes that are no UTF-8 become U+FFFD."""
        shown = (number for number in ids if not (skip_special_tokens and number in self._special))
        text = b"".join(piece_bytes(self.id_to_token(number) or "") for number in shown).decode(errors="replace")
        return text.removeprefix(" ") if self._prefixed else text

    def decode_batch(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        """Each sequence for itself."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def id_to_token(self, number: int) -> str | None:
        """The token as the vocabulary spells it, None for an id that no token has."""
        return self.tokens[number] if 0 <= number < len(self.tokens) else None

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        """The tokens that are found whole, by id."""
        return self.finder.get_added_tokens_decoder()

    def token_to_id(self, token: str) -> int | None:
        """The id of a token that is found whole, None for other spellings."""
        return self.finder.token_to_id(token)
