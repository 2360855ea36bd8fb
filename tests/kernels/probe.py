"""Tiny decoders made of a few ops, run on the CPU kernels and on the reference: how these tests reach a kernel.

A probe's rows come from its embedding table (float32, or exactly representable in bfloat16), so that row i of
the input is row ids[i] of a table the test chose.
"""

from collections.abc import Callable
from dataclasses import dataclass

import gguf
import numpy as np
import torch
from torch import Tensor

from model.decoder.inputs import NO_WINDOW, DecoderInput
from model.decoder.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec
from model.decoder.weights import RawWeight


def plain_spec(heads: int = 1, kv_heads: int = 1, head_dim: int = 8, layers: int = 1, **attention) -> DecoderSpec:
    """A spec that only says how the cache looks."""
    part = LayerSpec(AttentionSpec(heads, kv_heads, head_dim, **attention), MlpSpec(8))
    return DecoderSpec("probe", 8, heads * head_dim, 1 << 20, (part,) * layers)


PLAIN = plain_spec()


@dataclass(eq=False)
class Probe:
    """A "decoder": `build(ops)` is its forward pass."""

    build: Callable
    spec: DecoderSpec = PLAIN

    def forward(self, ops):
        return self.build(ops)


def raw(tensor: Tensor, kind: str = "F32") -> RawWeight:
    """A random matrix as a checkpoint would hold it in `kind`."""
    out, inner = tensor.shape
    if kind in ("F32", "F16", "BF16"):
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        return RawWeight(kind, tensor.to(dtype).contiguous(), out, inner)
    data = gguf.quants.quantize(tensor.numpy().astype(np.float32), gguf.GGMLQuantizationType[kind])
    return RawWeight(kind, torch.from_numpy(data.copy()), out, inner)


def tokens(ids, block_size: int = 16) -> DecoderInput:
    """One sequence of these ids from position 0 on, all rows wanted."""
    count = len(ids)
    return DecoderInput(
        ids=torch.as_tensor(ids, dtype=torch.int64),
        positions=torch.arange(count),
        slots=torch.arange(count),
        query_start=torch.tensor([0, count], dtype=torch.int32),
        block_tables=torch.arange(max(1, -(-count // block_size)), dtype=torch.int32).unsqueeze(0),
        sink_blocks=torch.zeros(1, dtype=torch.int32),
        recent_base=torch.zeros(1, dtype=torch.int64),
        sinks=torch.zeros(1, dtype=torch.int32),
        windows=torch.full((1,), NO_WINDOW),
        logit_rows=torch.arange(count),
    )


def run(backend, probe: Probe, inputs: DecoderInput, blocks: int = 64, block_size: int = 16) -> Tensor:
    """The probe's result on a fresh cache."""
    return backend.run(probe, inputs, backend.new_kv_store(probe.spec, blocks, block_size))
