"""The reference backend: every op at once in torch, on any device. The oracle, and what runs without our C++.

Knows how weights and cache are held here; `reference_ops.py` has the arithmetic, `reference_attention.py`
the paged attention. In float32 a row's result does not depend on its neighbours, bit for bit: every product
gets a multiple of 8 rows, each a multiple of 8 long, because torch takes other kernels, which sum in another
order, for fewer rows and for rows that begin off a vector's bounds (measured).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from model.decoder.dequantise import dequantise_weight
from model.decoder.inputs import DecoderInput
from model.decoder.kernels import Forward, KVStore
from model.decoder.kernels.reference_ops import ROWS, Step, round_up
from model.decoder.spec import DecoderSpec
from model.decoder.weights import BLOCK_BYTES, RawWeight

_GROUP = 32  # weights that share a scale in Q4_0 and Q4_1


@dataclass(frozen=True)
class DenseWeight:
    """A matrix in a float type, its rows filled up with zeros to a multiple of 8."""

    data: Tensor  # [out_features, padded in_features]
    in_features: int

    @property
    def out_features(self) -> int:
        return self.data.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def product(self, x: Tensor) -> Tensor:
        """x @ weight.T in the weight's type, returned in x's."""
        rows, width = x.shape
        padded = x
        if rows % ROWS or width % ROWS:
            padded = functional.pad(x, (0, self.data.shape[1] - width, 0, round_up(rows, ROWS) - rows))
        return functional.linear(padded.to(self.data.dtype), self.data)[:rows].to(x.dtype)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """[ids, in_features]: the rows named by `ids`."""
        return self.data.index_select(0, ids)[:, : self.in_features].to(dtype)


@dataclass(frozen=True)
class Int4Weight:
    """A matrix of 4-bit weights in groups of 32, each with its own scale and zero in float32 (so it is exact)."""

    packed: Tensor
    scales_and_zeros: Tensor  # [in_features / 32, out_features, 2]
    out_features: int
    in_features: int

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in (self.packed, self.scales_and_zeros))

    def product(self, x: Tensor) -> Tensor:
        """x @ weight.T for float32 x; the kernel is row-invariant as it stands."""
        result: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.packed, _GROUP, self.scales_and_zeros)
        return result


class ReferenceStore:
    """Keys and values: a tensor [blocks, kv_heads, block_size, padded head_dim] of each, a layer.

    Head dimensions are padded with zeros to a multiple of 8 for the same reason as rows are.
    """

    def __init__(
        self, spec: DecoderSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for layer in spec.layers:
            shape = (num_blocks, layer.attention.kv_heads, block_size, round_up(layer.attention.head_dim, ROWS))
            self.keys.append(torch.zeros(shape, dtype=dtype, device=device))
            self.values.append(torch.zeros(shape, dtype=dtype, device=device))
        self.num_bytes = sum(part.numel() * part.element_size() for part in (*self.keys, *self.values))

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block in all layers."""
        for part in (*self.keys, *self.values):
            part[target].copy_(part[source])


class ReferenceBackend:
    """`dtype` "float32" (or "float64") dequantises everything; "bfloat16" computes products in bfloat16;
    "auto" is float32 on the CPU, with 4-bit weights kept as they are where AVX-512 serves them, and bfloat16 elsewhere.
    """

    def __init__(self, device: str = "cpu", dtype: str = "auto", threads: int = 0) -> None:
        self.device = torch.device(device)
        on_cpu = self.device.type == "cpu"
        # Without AVX-512 torch's int4 product falls to a plain loop, 20 times slower than float32 (measured).
        self._int4 = dtype == "auto" and on_cpu and torch.backends.cpu.get_cpu_capability() == "AVX512"
        if dtype == "auto":
            dtype = "float32" if on_cpu else "bfloat16"
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.activations = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.lasting_rows = 0  # of no use here: torch makes new tensors anyway
        self.name = f"torch {dtype}"
        if threads and on_cpu:
            torch.set_num_threads(threads)

    def pack(self, weight: RawWeight, lookup: bool = False) -> DenseWeight | Int4Weight:
        """4-bit weights stay so where the kernel can take them; all others become dense."""
        if self._int4 and not lookup and weight.kind in ("Q4_0", "Q4_1") and weight.out_features % 16 == 0:
            return _pack_int4(weight)
        dense = dequantise_weight(weight) if weight.kind in BLOCK_BYTES else weight.data
        dense = dense.to(self.device, self.dtype, copy=True)
        pad = round_up(weight.in_features, ROWS) - weight.in_features
        if pad:  # padding by nothing would still copy
            dense = functional.pad(dense, (0, pad))
        return DenseWeight(dense.contiguous(), weight.in_features)

    def place(self, tensor: Tensor) -> Tensor:
        """Vectors and tables are read in the activations' type."""
        return tensor.to(self.device, self.activations, copy=True).contiguous()

    def new_kv_store(self, spec: DecoderSpec, num_blocks: int, block_size: int) -> ReferenceStore:
        """An empty cache in the products' type."""
        return ReferenceStore(spec, num_blocks, block_size, self.dtype, self.device)

    @torch.inference_mode()
    def run(self, decoder: Forward, inputs: DecoderInput, store: KVStore) -> Tensor:
        """One step: logits [rows, vocabulary] in float32 (float64 where that is the dtype)."""
        if not isinstance(store, ReferenceStore):
            raise TypeError("the reference backend runs on a cache of its own making")
        step = Step(inputs, store, self.device, self.activations)
        logits: Tensor = decoder.forward(step)
        return logits[: inputs.logit_rows.shape[0]]


def _pack_int4(weight: RawWeight) -> Int4Weight:
    """Q4_0 (w = d * (q - 8)) and Q4_1 (w = d * q + m) for torch's int4 product, w = (q - 8) * scale + zero."""
    signed = weight.kind == "Q4_0"
    blocks = weight.data.reshape(weight.out_features, weight.in_features // _GROUP, -1)  # [out, groups, bytes]
    halves = blocks[..., : 2 if signed else 4].contiguous().view(torch.float16).to(torch.float32)
    scale = halves[..., 0]
    zero = torch.zeros_like(scale) if signed else halves[..., 1] + 8.0 * scale
    nibbles = blocks[..., 2 if signed else 4 :]
    quants = torch.cat((nibbles & 15, nibbles >> 4), dim=-1).reshape(weight.out_features, -1)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(quants.to(torch.int32), 1)
    scales_and_zeros = torch.stack((scale, zero), dim=-1).transpose(0, 1).contiguous()  # [groups, out, 2]
    return Int4Weight(packed, scales_and_zeros, weight.out_features, weight.in_features)
