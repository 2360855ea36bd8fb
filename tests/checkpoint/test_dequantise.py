"""Dequantised values equal the `gguf` package's own, bit for bit, for each type that is served."""

import gguf
import numpy as np
import pytest
import torch

from model.decoder.dequantise import dequantise
from model.decoder.weights import BLOCK_BYTES


@pytest.mark.parametrize("kind", sorted(BLOCK_BYTES))
def test_random_bytes_dequantise_like_the_gguf_package(kind):
    weights, num_bytes = BLOCK_BYTES[kind]
    raw = np.random.default_rng(7).integers(0, 256, (37, 5 * num_bytes), dtype=np.uint8)
    halves = raw.reshape(-1, num_bytes)
    for place in (0, 2) if kind in ("Q4_1", "Q5_1") else (0,):
        halves[:, place + 1] &= 0xBB  # no infinities or NaNs: their payload bits are nobody's promise
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
    found = dequantise(kind, torch.from_numpy(raw))
    assert found.shape == (37, 5 * weights)
    assert np.array_equal(found.numpy().view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("kind", sorted(BLOCK_BYTES))
def test_a_quantised_matrix_comes_back_close(kind):
    matrix = np.random.default_rng(1).standard_normal((8, 96), dtype=np.float32)
    raw = gguf.quantize(matrix, gguf.GGMLQuantizationType[kind])
    error = np.abs(dequantise(kind, torch.from_numpy(raw)).numpy() - matrix).max()
    assert error < {"Q4_0": 0.5, "Q4_1": 0.3, "Q5_0": 0.25, "Q5_1": 0.15, "Q8_0": 0.02}[kind]


def test_nan_scales_give_nan_and_nothing_else():
    raw = np.zeros((1, 36), dtype=np.uint8)
    raw[0, :2] = (0x00, 0x7E)  # float16 NaN as the first block's scale
    found = dequantise("Q4_0", torch.from_numpy(raw))
    assert found[0, :32].isnan().all()
    assert not found[0, 32:].isnan().any()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_float_kinds_widen_exactly(kind):
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    tensor = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(dequantise(kind, tensor), tensor.float())
