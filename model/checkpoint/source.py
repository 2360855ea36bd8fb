"""What every weight format offers: a table of tensors, one tensor at a time, and letting its pages go.

Knows maps of files and dtypes; does not know formats, families or what a tensor is for.
"""

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as the file describes it. `kind`: "F32", "F16", "BF16", … or a quantised type's GGUF name."""

    kind: str
    shape: tuple[int, ...]
    num_bytes: int


class Source(Protocol):
    """A checkpoint's tensors. Reading one gives a view of a private map where the format allows: never write to it."""

    def table(self) -> Mapping[str, TensorInfo]:
        """All tensors by name, in the file's order."""

    def read(self, name: str) -> Tensor:
        """Float kinds: a tensor of the shape and the file's dtype. Quantised: uint8 [..., bytes a row]."""

    def release(self, name: str) -> None:
        """Give the tensor's resident pages back to the system; a view of it stays valid and pages in again."""


def view(data: mmap.mmap, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor over the map's bytes, without a copy unless they are not aligned to the dtype."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    if start % dtype.itemsize:
        raw = torch.frombuffer(data, dtype=torch.uint8, count=count * dtype.itemsize, offset=start)
        return raw.clone().view(dtype).view(shape)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=start).view(shape)


def forget(data: mmap.mmap, start: int, num_bytes: int) -> None:
    """Drop the map's resident pages of this range (they stay in the system's page cache)."""
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    if num_bytes and hasattr(mmap, "MADV_DONTNEED"):
        data.madvise(mmap.MADV_DONTNEED, first, start + num_bytes - first)
