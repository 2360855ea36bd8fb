"""Filling a decoder from a checkpoint: each parameter once, each tensor used or dropped by name.

Knows the order of events: open, name, build, then read, reshape, pack and let go, one tensor at a time, so
that loading never holds more than the model and one tensor. Knows no format, no family and no kernel.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from model.checkpoint.naming import Books
from model.checkpoint.opening import Opened, open_checkpoint
from model.checkpoint.source import TensorInfo
from model.decoder.decoder import Decoder
from model.decoder.dequantise import dequantise
from model.decoder.kernels import Backend
from model.decoder.spec import DecoderSpec
from model.decoder.weights import BLOCK_BYTES, RawWeight
from model.gguf_file import CheckpointError

_FEW = 5
_KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class Loaded:
    """A decoder ready to run, and what the worker tells the door about it."""

    decoder: Decoder
    spec: DecoderSpec
    books: Books
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


def read_spec(path: str | Path, context: int = 0) -> DecoderSpec:
    """The spec of a checkpoint, without its weights; raises CheckpointError."""
    return open_checkpoint(path, context).spec


def load(path: str | Path | Opened, *, backend: Backend, context: int = 0) -> Loaded:
    """A filled decoder on `backend`, from a path or from what `open_checkpoint` gave for it.

    `context` is the served context in tokens, 0 for the model's own; an opened checkpoint has it already.
    Raises CheckpointError, one sentence, for anything in the files that cannot be served.
    """
    opened = path if isinstance(path, Opened) else open_checkpoint(path, context)
    decoder = Decoder(opened.spec, backend)
    for name, ours in opened.books.used.items():
        fill(decoder, opened, name, ours, opened.source.read(name))
        opened.source.release(name)
    finish(decoder, opened)
    return Loaded(decoder, opened.spec, opened.books, opened.bos_token_id, opened.eos_token_ids)


def fill(decoder: Decoder, opened: Opened, name: str, ours: str, data: Tensor) -> None:
    """Fill the parameters that the stored tensor `name` holds; `ours` is its place."""
    info = opened.table[name]
    try:
        for parameter, part in reshaped(opened, ours, data).items():
            decoder.fill(parameter, as_parameter(info, part))
    except CheckpointError:
        raise
    except (ValueError, KeyError, RuntimeError, IndexError, TypeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{opened.path}: the tensor {name!r} ({info.kind} {list(info.shape)}) does not fit this model ({reason}); "
            "download it again, or use another checkpoint."
        ) from error


def finish(decoder: Decoder, opened: Opened) -> None:
    """The end of the books: every parameter is filled, or a complaint."""
    missing = sorted(decoder.missing())
    if missing:
        shown = ", ".join(missing[:_FEW]) + (" …" if len(missing) > _FEW else "")
        raise CheckpointError(
            f"{opened.path} lacks {len(missing)} parameters ({shown}); download it whole, or convert it again."
        )


def reshaped(opened: Opened, ours: str, data: Tensor) -> Mapping[str, Tensor]:
    """The parameters that one stored tensor holds (fused or permuted ones are a family's knowledge)."""
    reshape = getattr(opened.family, "gguf_reshape" if opened.format == "GGUF" else "reshape", None)
    if reshape is None:
        return {ours: data}
    result: Mapping[str, Tensor] = reshape(ours, data, opened.spec)
    return result


def as_parameter(info: TensorInfo, data: Tensor) -> RawWeight | Tensor:
    """A matrix as a RawWeight in the file's own kind; anything else as a float32 tensor."""
    if info.kind in BLOCK_BYTES:
        if data.ndim != 2:
            return dequantise(info.kind, data)
        weights, num_bytes = BLOCK_BYTES[info.kind]
        return RawWeight(info.kind, data, data.shape[0], data.shape[1] // num_bytes * weights)
    if data.ndim != 2:
        return data.to(torch.float32, copy=True)  # small, and then nothing of the file stays in use
    if data.dtype not in _KINDS:
        data = data.to(torch.float32)
    return RawWeight(_KINDS[data.dtype], data, data.shape[0], data.shape[1])
