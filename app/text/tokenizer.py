"""Text to ids and back, from a model folder's files or a GGUF file's metadata.

Knows vocabularies and special tokens; does not know chats, streams or stop strings. The work is done by the
`tokenizers` and `sentencepiece` libraries; this file finds the parts and answers questions about single tokens.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import processors

from app.text import gguf_tokenizer, model_file
from app.text.sentence_pieces import SentencePieces, piece_bytes
from model.gguf_file import CheckpointError, read_gguf_file


class TokenizerError(ValueError):
    """A model's tokenizer cannot be used. The text is one sentence that names the file and the remedy."""


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the others for U+0100 onward."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


@dataclass(frozen=True)
class Tokenizer:
    """A vocabulary in use. `backend` is the pipeline itself, for streaming decoders."""

    backend: Backend | SentencePieces
    size: int
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    chat_template: str | None = None
    special_ids: frozenset[int] = frozenset()
    byte_level: bool = True
    _added: Mapping[int, str] = field(default_factory=dict)

    @property
    def bos_token(self) -> str:
        """The bos token's text, "" where there is none."""
        return "" if self.bos_id is None else self.piece(self.bos_id)

    @property
    def eos_token(self) -> str:
        """The first eos token's text, "" where there is none."""
        return self.piece(self.eos_ids[0]) if self.eos_ids else ""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Ids of `text`; special tokens written in it are found whole. `add_special` adds bos and eos as trained."""
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special).ids
        return ids

    def encode_with_offsets(self, text: str, add_special: bool = True) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids, and for each where it stands in `text`, in characters; added tokens stand at (0, 0)."""
        encoding = self.backend.encode(text, add_special_tokens=add_special)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special))

    def is_special(self, token: int) -> bool:
        """Whether the id is a control token, not text."""
        return token in self.special_ids

    def piece(self, token: int) -> str:
        """The token as the vocabulary spells it; "" for an id that no token has."""
        return self.backend.id_to_token(token) or ""

    def token_bytes(self, token: int) -> bytes:
        """The bytes the token stands for inside a text; an added token's own text for an added token."""
        known = self._known_bytes.get(token)
        if known is None:
            known = self._known_bytes[token] = self._bytes_of(token)
        return known

    @cached_property
    def _known_bytes(self) -> dict[int, bytes]:
        """What was asked for before: a stream asks for each token twice. Bounded by the vocabulary."""
        return {}

    def _bytes_of(self, token: int) -> bytes:
        piece = self._added.get(token, self.piece(token))
        if not self.byte_level:
            return piece_bytes(piece)
        if token in self._added:
            return piece.encode()
        return b"".join(bytes([_ALPHABET[char]]) if char in _ALPHABET else char.encode() for char in piece)

    @cached_property
    def longest_token(self) -> int | None:
        """Bytes of the longest token where a text is never shorter than its tokens joined, None where it may be.

        It may be where a normaliser, a pre-tokenizer or a token that takes the spaces beside it drops some of a text.
        """
        if not isinstance(self.backend, Backend) or not self.byte_level or self.backend.normalizer is not None:
            return None
        dropping = any(word in str(self.backend.pre_tokenizer) for word in ("Removed", "Whitespace", "BertPre"))
        if dropping or any(token.lstrip or token.rstrip for token in self.backend.get_added_tokens_decoder().values()):
            return None
        return max((len(self._bytes_of(token)) for token in range(self.size)), default=None)

    @cached_property
    def all_token_bytes(self) -> tuple[bytes, ...]:
        """`token_bytes` of every id in order (what a grammar or a search for stop strings walks through)."""
        return tuple(self.token_bytes(token) for token in range(self.size))


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a `.gguf` file or of a model folder; raises TokenizerError."""
    path = Path(path)
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if not files or (path / "tokenizer.json").exists():
            return _from_folder(path)
        path = files[0]
    return _from_gguf(path)


def _from_gguf(path: Path) -> Tokenizer:
    try:
        metadata = read_gguf_file(path).metadata
    except CheckpointError as error:
        raise TokenizerError(str(error)) from error
    try:
        backend = gguf_tokenizer.build(metadata)
    except Exception as error:  # the library raises plain Exceptions for vocabularies that contradict themselves
        said = str(error).rstrip(".")
        raise TokenizerError(f"{path} has no tokenizer that can be used: {said}; convert the model again.") from error
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    template = metadata.get("tokenizer.chat_template")
    return _assemble(
        backend,
        size=len(metadata["tokenizer.ggml.tokens"]),
        bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_ids=tuple(dict.fromkeys(token for token in ids if isinstance(token, int))),
        chat_template=template if isinstance(template, str) else None,
    )


def _from_folder(folder: Path) -> Tokenizer:
    config = _json(folder / "tokenizer_config.json")
    bos, eos = (_text(config.get(f"{name}_token")) for name in ("bos", "eos"))
    pieces = None if (folder / "tokenizer.json").exists() else _from_model_file(folder, config)
    backend: Backend | SentencePieces
    if pieces is None:
        backend = _from_json(folder)
        size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        _follow_flags(backend, config, bos, eos)
    else:
        backend, size = pieces, len(pieces.tokens)
        bos, eos = bos or pieces.bos, eos or pieces.eos
        stated = {name: flag for name, flag in config.items() if flag is not None}
        _follow_flags(pieces.finder, {"add_bos_token": True} | stated, bos, eos)
    model_config = _json(folder / "config.json")
    ends = _json(folder / "generation_config.json").get("eos_token_id", model_config.get("eos_token_id"))
    eos_ids = [token for token in (ends if isinstance(ends, list) else [ends]) if isinstance(token, int)]
    if not eos_ids and eos is not None:
        eos_ids = [token for token in [backend.token_to_id(eos)] if token is not None]
    bos_id = backend.token_to_id(bos) if bos is not None else model_config.get("bos_token_id")
    return _assemble(backend, size, bos_id, tuple(dict.fromkeys(eos_ids)), _folder_template(folder, config))


def _from_json(folder: Path) -> Backend:
    file = folder / "tokenizer.json"
    if not file.exists():
        _convert(folder)
    try:
        return Backend.from_file(str(file))
    except Exception as error:  # the library raises plain Exceptions
        raise TokenizerError(f"{file} cannot be read ({error}); download it again.") from error


def _from_model_file(folder: Path, config: Mapping[str, Any]) -> SentencePieces | None:
    """What the folder's tokenizer.model makes, None where it has none that is read as it is."""
    file = folder / "tokenizer.model"
    if not file.exists():
        return None
    try:
        return model_file.build(file.read_bytes(), config, _json(folder / "added_tokens.json"))
    except OSError as error:
        raise TokenizerError(f"{file} cannot be read ({error.strerror}); download it again.") from error
    except ValueError as error:
        raise TokenizerError(
            f"{file} cannot be read ({error}); download it again, or add the model's tokenizer.json."
        ) from error


def _convert(folder: Path) -> None:
    """Have a process of its own write the folder's tokenizer.json: that takes transformers, which stays out of here."""
    made = subprocess.run(
        [sys.executable, "-m", "model.checkpoint.tokenizer_conversion", str(folder.absolute())],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    if made.returncode != 0:
        said = made.stderr.strip().splitlines()
        raise TokenizerError(said[-1] if said else f"{folder} has no tokenizer.json; add the model's own.")


def _assemble(
    backend: Backend | SentencePieces, size: int, bos_id: Any, eos_ids: tuple[int, ...], chat_template: str | None
) -> Tokenizer:
    added = backend.get_added_tokens_decoder()
    return Tokenizer(
        backend=backend,
        size=size,
        bos_id=bos_id if isinstance(bos_id, int) and 0 <= bos_id < size else None,
        eos_ids=tuple(token for token in eos_ids if 0 <= token < size),
        chat_template=chat_template,
        special_ids=frozenset(number for number, token in added.items() if token.special),
        byte_level=isinstance(backend, Backend) and "ByteLevel" in str(backend.decoder),
        _added={number: token.content for number, token in added.items()},
    )


def _follow_flags(backend: Backend, config: Mapping[str, Any], bos: str | None, eos: str | None) -> None:
    """Some folders say in tokenizer_config.json alone that texts begin with bos or end with eos: hold to it."""
    asked = {name: config.get(f"add_{name}_token") for name in ("bos", "eos")}
    if not any(isinstance(flag, bool) for flag in asked.values()):
        return
    added = backend.encode("", add_special_tokens=True).ids
    ends = {}
    for name, token in (("bos", bos), ("eos", eos)):
        number = None if token is None else backend.token_to_id(token)
        flag = asked[name]
        if token is not None and number is not None and (flag if isinstance(flag, bool) else number in added):
            ends[name] = (token, number)
    if [number for _, number in ends.values()] == added:
        return
    before, after = ([ends[name][0]] if name in ends else [] for name in ("bos", "eos"))
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after], special_tokens=list(ends.values())
    )


def _folder_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template: a file of its own, or in the configuration, alone or as the one named "default"."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {row.get("name"): row.get("template") for row in template if isinstance(row, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _text(token: Any) -> str | None:
    """A token's text: configurations write it plain, or as an object with its content."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read ({error}); download it again.") from error
    return value if isinstance(value, dict) else {}
