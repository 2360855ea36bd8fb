"""safetensors as a source of tensors: one file, or shards with their index.

Maps the files itself, because a map of our own can give a tensor's pages back once it is packed; the
format is a length, a JSON table and raw bytes (https://github.com/huggingface/safetensors#format).
"""

import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.checkpoint.source import FLOAT_DTYPES, TensorInfo, forget, view
from model.gguf_file import CheckpointError

_DTYPES = FLOAT_DTYPES | {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LONGEST_HEADER = 100_000_000  # the reference implementation's own limit


@dataclass(frozen=True)
class _Entry:
    file: Path
    data: mmap.mmap
    start: int
    info: TensorInfo


class SafetensorsSource:
    """The tensors of a folder's safetensors files, or of one file."""

    def __init__(self, path: Path) -> None:
        self._places: dict[str, _Entry] = {}
        files, index = ([path], None) if path.is_file() else _files(path)
        for file in files:
            for name, entry in _read_header(file).items():
                if name in self._places:
                    raise CheckpointError(
                        f"{file}: the tensor {name!r} stands in {self._places[name].file.name} too; "
                        "download the model again."
                    )
                self._places[name] = entry
        for name, file in (index or {}).items():
            if name not in self._places or self._places[name].file != file:
                raise CheckpointError(f"{file} lacks the tensor {name!r} that the index promises; download it again.")

    def table(self) -> Mapping[str, TensorInfo]:
        return {name: entry.info for name, entry in self._places.items()}

    def read(self, name: str) -> Tensor:
        entry = self._places[name]
        if entry.info.kind not in _DTYPES:
            raise CheckpointError(
                f"{entry.file}: the tensor {name!r} has type {entry.info.kind}, which is not served; "
                "save the model in float32, float16 or bfloat16."
            )
        return view(entry.data, entry.start, _DTYPES[entry.info.kind], entry.info.shape)

    def release(self, name: str) -> None:
        entry = self._places[name]
        forget(entry.data, entry.start, entry.info.num_bytes)


def _files(folder: Path) -> tuple[list[Path], dict[str, Path] | None]:
    """The folder's files, and where its index says each tensor stands."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        single = folder / "model.safetensors"
        return [single] if single.exists() else sorted(folder.glob("*.safetensors")), None
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        where = {str(name): folder / Path(str(file)).name for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index; download it again.") from error
    return sorted(set(where.values())), where


def _read_header(path: Path) -> dict[str, _Entry]:
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "the file is empty"
        raise CheckpointError(f"{path} cannot be read ({reason}); download it again.") from error
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(len(data) - 8, _LONGEST_HEADER):
        raise CheckpointError(f"{path} is damaged: its header ends beyond the file; download it again.")
    try:
        header = json.loads(data[8 : 8 + length])
        entries = {
            str(name): _entry(path, data, 8 + length, row) for name, row in header.items() if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is damaged: its header cannot be read; download it again.") from error
    return entries


def _entry(path: Path, data: mmap.mmap, base: int, row: dict[str, Any]) -> _Entry:
    kind, shape = str(row["dtype"]), tuple(int(n) for n in row["shape"])
    begin, end = (int(n) for n in row["data_offsets"])
    wanted = math.prod(shape) * _DTYPES[kind].itemsize if kind in _DTYPES else end - begin
    if min(shape, default=0) < 0 or begin < 0 or end - begin != wanted or base + end > len(data):
        raise CheckpointError(
            f"{path} is damaged: a tensor of shape {shape} is said to stand at bytes {begin} to {end} "
            f"of {len(data) - base}; download it again."
        )
    return _Entry(path, data, base + begin, TensorInfo(kind, shape, end - begin))
