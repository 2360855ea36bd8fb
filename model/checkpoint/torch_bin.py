"""PyTorch `.bin` files as a source of tensors.

Knows that they are pickles, so they are read with `weights_only=True` alone: no code in them ever runs.
"""

import json
import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from model.checkpoint.source import FLOAT_DTYPES, TensorInfo
from model.gguf_file import CheckpointError

_KINDS = {dtype: kind for kind, dtype in FLOAT_DTYPES.items()}


class TorchBinSource:
    """The tensors of a folder's `pytorch_model*.bin`, mapped where the file's format allows."""

    def __init__(self, folder: Path) -> None:
        self._tensors: dict[str, Tensor] = {}
        for file in _files(folder):
            loaded = _load(file)
            if not isinstance(loaded, dict) or not all(isinstance(t, Tensor) for t in loaded.values()):
                raise CheckpointError(f"{file} is not a table of tensors; convert the model to safetensors.")
            self._tensors |= {str(name): tensor for name, tensor in loaded.items()}
        self._table = {
            name: TensorInfo(_KINDS.get(t.dtype, str(t.dtype)), tuple(t.shape), t.numel() * t.element_size())
            for name, t in self._tensors.items()
        }

    def table(self) -> Mapping[str, TensorInfo]:
        return self._table

    def read(self, name: str) -> Tensor:
        return self._tensors[name].detach()

    def release(self, name: str) -> None:
        """These files share one storage each; what can be let go is the reference."""
        self._tensors.pop(name, None)


def _files(folder: Path) -> list[Path]:
    index = folder / "pytorch_model.bin.index.json"
    if not index.exists():
        return [folder / "pytorch_model.bin"]
    try:
        return sorted({folder / Path(str(file)).name for file in json.loads(index.read_bytes())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index of weights; download it again.") from error


def _load(file: Path) -> object:
    """The file's table; files of the format before torch 1.6 cannot be mapped and are read whole."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=_is_zip(file))
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{file} cannot be read safely ({reason[:200]}); convert the model to safetensors."
        ) from error


def _is_zip(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(2) == b"PK"
