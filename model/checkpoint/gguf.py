"""GGUF as a source of tensors: one file or all parts of a split one.

Knows files and types; the container itself is `model.gguf_file`'s business, the names are a family's.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.checkpoint.source import FLOAT_DTYPES, TensorInfo, forget, view
from model.decoder.weights import BLOCK_BYTES
from model.gguf_file import CheckpointError, GgufFile, TensorEntry, read_gguf_file

_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MOST_PARTS = 99_999


class GgufSource:
    """The tensors of a GGUF model. `metadata` is the first part's."""

    def __init__(self, path: str | Path) -> None:
        first = read_gguf_file(path, vocabulary=False)
        files = [first] if first.metadata.get("split.count", 1) in (0, 1) else _parts(first)
        self.path = Path(path)
        self.metadata: Mapping[str, Any] = files[0].metadata
        self._places: dict[str, tuple[GgufFile, TensorEntry]] = {}
        for file in files:
            for entry in file.tensors:
                if entry.name in self._places:
                    raise CheckpointError(
                        f"{file.path}: the tensor {entry.name!r} stands in another part too; download the parts again."
                    )
                self._places[entry.name] = (file, entry)
        promised = self.metadata.get("split.tensors.count", len(self._places))
        if promised != len(self._places):
            raise CheckpointError(
                f"{path}: its parts hold {len(self._places)} tensors, but {promised} were promised; "
                "download the parts again."
            )

    def table(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(e.kind, e.shape, e.num_bytes) for name, (_, e) in self._places.items()}

    def read(self, name: str) -> Tensor:
        file, entry = self._places[name]
        if entry.kind in FLOAT_DTYPES:
            return view(file.data, entry.start, FLOAT_DTYPES[entry.kind], entry.shape)
        if entry.kind not in BLOCK_BYTES:
            raise CheckpointError(
                f"{file.path}: the tensor {name!r} has type {entry.kind}, which is not served; "
                f"quantise the model to one of F32, F16, BF16, {', '.join(BLOCK_BYTES)}."
            )
        weights, num_bytes = BLOCK_BYTES[entry.kind]
        row = entry.shape[-1] // weights * num_bytes
        return view(file.data, entry.start, torch.uint8, (*entry.shape[:-1], row))

    def release(self, name: str) -> None:
        file, entry = self._places[name]
        forget(file.data, entry.start, entry.num_bytes)


def _parts(first: GgufFile) -> list[GgufFile]:
    """All parts of a split model, in order; `first` may be any of them."""
    count = first.metadata["split.count"]
    match = _PART.fullmatch(first.path.name)
    if match is None or not isinstance(count, int) or count > _MOST_PARTS or int(match["count"]) != count:
        raise CheckpointError(
            f"{first.path} is one of {count} parts, but is not named NAME-00001-of-{count:0>5}.gguf; "
            "give the parts their original names."
        )
    files = []
    for number in range(1, count + 1):
        path = first.path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf")
        if not path.exists():
            raise CheckpointError(f"{path} is missing: {first.path.name} needs all {count} parts; download it too.")
        file = first if path == first.path else read_gguf_file(path, vocabulary=False)
        if file.metadata.get("split.count") != count or file.metadata.get("split.no") != number - 1:
            raise CheckpointError(f"{path} is not part {number} of {count}; download the parts again.")
        files.append(file)
    return files
