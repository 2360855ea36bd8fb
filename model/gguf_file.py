"""The GGUF container: header, metadata and tensor table of one file, read through a memory map.

Knows bytes, names and sizes; standard library only, so both rooms may read metadata with it. Does not
know what a key means, and never touches a tensor's bytes. Every number in the file is checked against
the file's size before it is believed. Layout: the GGUF specification, versions 2 and 3, little endian.
"""

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from struct import error as StructError
from typing import Any


class CheckpointError(ValueError):
    """A model that cannot be read or served. The text is one sentence that names the file and the remedy."""


# Number in the file: (name, weights in a block, bytes in a block). Sizes: ggml's block structures.
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}

# Number in the file: struct code. Strings (8) and arrays (9) are read apart.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_DEEPEST_ARRAY = 3
_LONGEST_NAME = 1 << 16


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the table. `shape` is row-major (the file lists it the other way round); `start` is absolute."""

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """One file, mapped. `data` is a private map: a tensor made over it may be written without changing the file."""

    path: Path
    data: mmap.mmap
    metadata: Mapping[str, Any]
    tensors: tuple[TensorEntry, ...]


def read_gguf_file(path: str | Path, vocabulary: bool = True) -> GgufFile:
    """Map one GGUF file and read everything but its tensors' bytes; raises CheckpointError.

    Without `vocabulary`, lists of strings under "tokenizer." are passed over: they are most of the work.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:  # mmap refuses an empty file with a ValueError
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "the file is empty"
        raise CheckpointError(f"{path} cannot be read ({reason}); check the path, or download it again.") from error
    reader = _Reader(path, data, vocabulary)
    metadata, tensors = reader.read()
    return GgufFile(path, data, metadata, tensors)


class _Reader:
    """A cursor over the map; every read says what it was reading when the file ended."""

    def __init__(self, path: Path, data: mmap.mmap, vocabulary: bool) -> None:
        self.path, self.data, self.size, self.position = path, data, len(data), 0
        self.vocabulary = vocabulary
        self.key = ""
        self.structs = {code: Struct(f"<{code}") for code in _SCALARS.values()}
        self.place = "its header"

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged: {what}; download it again.")

    def ends(self) -> CheckpointError:
        return self.damaged(f"it ends inside {self.place} (it has only {self.size} bytes)")

    def scalar(self, code: str) -> Any:
        try:
            (value,) = self.structs[code].unpack_from(self.data, self.position)
        except StructError:
            raise self.ends() from None
        self.position += self.structs[code].size
        return value

    def count(self, smallest: int) -> int:
        """A 64-bit count of things that take at least `smallest` bytes each: never more than the file can hold."""
        number: int = self.scalar("Q")
        if number * smallest > self.size - self.position:
            raise self.ends()
        return number

    def string(self) -> str:
        length = self.count(1)
        start = self.position
        self.position = start + length
        return self.text(self.data[start : self.position])

    def text(self, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.damaged(f"a string in {self.place} is not UTF-8") from None

    def pass_strings(self, count: int) -> list[str]:
        """Go past `count` strings; an empty list stands for them."""
        position, unpack = self.position, self.structs["Q"].unpack_from
        try:
            for _ in range(count):
                position += 8 + unpack(self.data, position)[0]
        except (StructError, OverflowError, IndexError):
            raise self.ends() from None
        if position > self.size:
            raise self.ends()
        self.position = position
        return []

    def strings(self, count: int) -> list[str]:
        """`count` strings. The loop a vocabulary goes through: 50,000 take about 20 ms."""
        data, position, unpack = self.data, self.position, self.structs["Q"].unpack_from
        found = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack(data, position)[0]
                found.append(str(data[start:position], "utf-8"))
        except (StructError, OverflowError, IndexError):
            raise self.ends() from None
        except UnicodeDecodeError:
            if position > self.size:
                raise self.ends() from None
            raise self.damaged(f"a string in {self.place} is not UTF-8") from None
        if position > self.size:
            raise self.ends()
        self.position = position
        return found

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(depth + 1)
        if kind not in _SCALARS:
            raise self.damaged(f"{self.place} has the unknown type {kind}")
        return self.scalar(_SCALARS[kind])

    def array(self, depth: int) -> list[Any]:
        kind: int = self.scalar("I")
        if depth > _DEEPEST_ARRAY:
            raise self.damaged(f"{self.place} nests arrays too deeply")
        if kind == _STRING:
            wanted = self.vocabulary or not self.key.startswith("tokenizer.")
            return self.strings(self.count(8)) if wanted else self.pass_strings(self.count(8))
        if kind == _ARRAY:
            return [self.array(depth + 1) for _ in range(self.count(12))]
        if kind not in _SCALARS:
            raise self.damaged(f"{self.place} has elements of the unknown type {kind}")
        code = _SCALARS[kind]
        width = self.structs[code].size
        count = self.count(width)
        values = Struct(f"<{count}{code}").unpack_from(self.data, self.position)
        self.position += count * width
        return list(values)

    def read(self) -> tuple[dict[str, Any], tuple[TensorEntry, ...]]:
        if self.data[:4] != b"GGUF":
            raise CheckpointError(
                f"{self.path} is not a GGUF file (it begins with {self.data[:4]!r}); give a .gguf file or a folder."
            )
        self.position = 4
        version: int = self.scalar("I")
        if version not in (2, 3):
            raise CheckpointError(
                f"{self.path} is GGUF version {version}; versions 2 and 3, little endian, are read: convert it again."
            )
        num_tensors, num_keys = self.count(24), self.count(13)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            self.place = "its metadata"
            key = self.string()
            if key in metadata or len(key) > _LONGEST_NAME:
                raise self.damaged(f"its metadata key {key[:80]!r} stands there twice or is too long")
            self.place, self.key = f"its metadata key {key[:80]!r}", key
            metadata[key] = self.value(self.scalar("I"))
        return metadata, self.table(num_tensors, self.alignment(metadata))

    def alignment(self, metadata: Mapping[str, Any]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.damaged(f"its alignment {alignment!r} is not a power of two")
        return alignment

    def table(self, count: int, alignment: int) -> tuple[TensorEntry, ...]:
        self.place = "its tensor table"
        entries = [self.entry() for _ in range(count)]
        base = -(-self.position // alignment) * alignment
        placed = tuple(TensorEntry(e.name, e.kind, e.shape, base + e.start, e.num_bytes) for e in entries)
        names = {entry.name for entry in placed}
        if len(names) != len(placed):
            twice = next(e.name for i, e in enumerate(placed) if e.name in {p.name for p in placed[:i]})
            raise self.damaged(f"the tensor {twice!r} stands in its table twice")
        end, before = base, ""
        for entry in sorted(placed, key=lambda e: e.start):
            if entry.start % alignment:
                raise self.damaged(f"the tensor {entry.name!r} does not begin at a multiple of {alignment} bytes")
            if entry.start < end:
                raise self.damaged(f"the tensors {before!r} and {entry.name!r} overlap")
            end, before = entry.start + entry.num_bytes, entry.name
            if end > self.size:
                raise self.damaged(f"the tensor {before!r} ends at byte {end}, but the file has only {self.size}")
        return placed

    def entry(self) -> TensorEntry:
        """One row of the tensor table; `start` is still relative to the data section."""
        name = self.string()
        num_dimensions: int = self.scalar("I")
        if num_dimensions > _MOST_DIMENSIONS:
            raise self.damaged(f"the tensor {name[:80]!r} has {num_dimensions} dimensions")
        shape = tuple(reversed([int(self.scalar("Q")) for _ in range(num_dimensions)]))
        number: int = self.scalar("I")
        start: int = self.scalar("Q")
        if number not in TENSOR_TYPES:
            raise CheckpointError(
                f"{self.path}: the tensor {name[:80]!r} has type number {number}, which this program does not know; "
                "convert the model to one of " + ", ".join(k for k, _, _ in TENSOR_TYPES.values()) + "."
            )
        kind, block, block_bytes = TENSOR_TYPES[number]
        row = shape[-1] if shape else 1
        if row % block:
            raise self.damaged(f"the tensor {name[:80]!r} has rows of {row}, not a multiple of {kind}'s {block}")
        return TensorEntry(name, kind, shape, start, math.prod(shape) // block * block_bytes)
