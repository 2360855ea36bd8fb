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
    values = torch.empty(blocks.shape[0], weights, dtype=torch.float32, device=data.device)
    for start in range(0, blocks.shape[0], _CHUNK):
        _KINDS[kind](blocks[start : start + _CHUNK], values[start : start + _CHUNK])
    return values.reshape(*data.shape[:-1], data.shape[-1] // num_bytes * weights)


def _half(blocks: Tensor, place: int) -> Tensor:
    """The float16 at byte `place` of each block, as float32 [blocks, 1]."""
    return blocks[:, place : place + 2].contiguous().view(torch.float16).to(torch.float32)


def _unpack(quants: Tensor, result: Tensor) -> None:
    """[blocks, 16] bytes → values 0..15 in result [blocks, 32]."""
    result[:, :16] = quants & 15
    result[:, 16:] = quants >> 4


def _fifth_bits(word: Tensor) -> Tensor:
    """[blocks, 4] bytes, little endian → [blocks, 32] of 0 or 16: bit i belongs to weight i."""
    shifts = torch.arange(8, dtype=torch.uint8, device=word.device)
    return ((word.unsqueeze(-1) >> shifts) & 1).reshape(-1, 32) << 4


def _q4_0(blocks: Tensor, result: Tensor) -> None:
    _unpack(blocks[:, 2:], result)
    result.sub_(8.0).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor, result: Tensor) -> None:
    _unpack(blocks[:, 4:], result)
    result.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor, result: Tensor) -> None:
    _unpack(blocks[:, 6:], result)
    result.add_(_fifth_bits(blocks[:, 2:6])).sub_(16.0).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor, result: Tensor) -> None:
    _unpack(blocks[:, 8:], result)
    result.add_(_fifth_bits(blocks[:, 4:8])).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor, result: Tensor) -> None:
    result.copy_(blocks[:, 2:].contiguous().view(torch.int8)).mul_(_half(blocks, 0))


_CHUNK = 1 << 14  # blocks at a time: what is worked on stays in the processor's caches
_KINDS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
}
