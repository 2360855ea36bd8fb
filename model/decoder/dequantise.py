"""Quantised blocks to float32, in torch, on any device: bit for bit what the `gguf` package's `dequantize` gives.

Knows the block layouts of GGUF's types of groups of 32; no files, no names. A block is its scale `d`
(float16), where the type has one its minimum `m` (float16), where the type has five bits a word of fifth
bits, then the quants: low nibbles are weights 0..15, high nibbles 16..31. (Layouts: ggml-quants.)
"""

from collections.abc import Callable

import torch
from torch import Tensor

from model.decoder.weights import BLOCK_BYTES, RawWeight


def dequantise_weight(raw: RawWeight) -> Tensor:
    """float32 [out_features, in_features] of a weight in any kind."""
    return dequantise(raw.kind, raw.data)


def dequantise(kind: str, data: Tensor) -> Tensor:
    """float32 of `data`: quantised kinds take uint8 [..., bytes a row] and give [..., weights a row].

    Raises KeyError for a kind that is neither float nor in `BLOCK_BYTES`.
    """
    if kind in ("F32", "F16", "BF16"):
        return data.to(torch.float32)
    weights, num_bytes = BLOCK_BYTES[kind]
    blocks = data.reshape(-1, num_bytes)  # [blocks, bytes]
    values = _KINDS[kind](blocks)  # [blocks, weights]
    return values.reshape(*data.shape[:-1], data.shape[-1] // num_bytes * weights)


def _half(blocks: Tensor, place: int) -> Tensor:
    """The float16 at byte `place` of each block, as float32 [blocks, 1]."""
    return blocks[:, place : place + 2].contiguous().view(torch.float16).to(torch.float32)


def _nibbles(quants: Tensor) -> Tensor:
    """[blocks, 16] bytes → [blocks, 32] values 0..15."""
    return torch.cat((quants & 15, quants >> 4), dim=1)


def _fifth_bits(word: Tensor) -> Tensor:
    """[blocks, 4] bytes, little endian → [blocks, 32] of 0 or 16: bit i belongs to weight i."""
    shifts = torch.arange(8, dtype=torch.uint8, device=word.device)
    return ((word.unsqueeze(-1) >> shifts) & 1).reshape(-1, 32) << 4


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).to(torch.float32) - 8.0)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).to(torch.float32) + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    quants = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _half(blocks, 0) * (quants.to(torch.float32) - 16.0)


def _q5_1(blocks: Tensor) -> Tensor:
    quants = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _half(blocks, 0) * quants.to(torch.float32) + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).to(torch.float32) * _half(blocks, 0)


_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
}
