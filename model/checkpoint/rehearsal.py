"""A loading without weights: every tensor's shape goes where its bytes would go, and nothing is read.

Knows what loading does; finds what is missing, what does not fit, and how many parameters each part has.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from model.checkpoint.loading import fill, finish
from model.checkpoint.opening import Opened
from model.checkpoint.source import FLOAT_DTYPES, TensorInfo
from model.decoder.decoder import Decoder
from model.decoder.inputs import DecoderInput
from model.decoder.kernels import Forward, KVStore
from model.decoder.parameters import Parameter
from model.decoder.spec import DecoderSpec
from model.decoder.weights import BLOCK_BYTES, RawWeight


@dataclass(frozen=True)
class _Shape:
    """What is left of a packed weight: its size."""

    out_features: int
    in_features: int
    num_bytes: int


class _NoBackend:
    """Takes every weight and keeps none; it cannot run."""

    name = "none"
    lasting_rows = 0

    def pack(self, weight: RawWeight, lookup: bool = False) -> _Shape:
        """The shape alone."""
        num_bytes = weight.data.numel() * weight.data.element_size()
        return _Shape(weight.out_features, weight.in_features, num_bytes)

    def place(self, tensor: Tensor) -> Tensor:
        """The tensor as it is."""
        return tensor

    def new_kv_store(self, spec: DecoderSpec, num_blocks: int, block_size: int) -> KVStore:
        """Never called: nothing runs."""
        raise NotImplementedError

    def run(self, decoder: Forward, inputs: DecoderInput, store: KVStore) -> Tensor:
        """Never called: nothing runs."""
        raise NotImplementedError


def rehearse(opened: Opened) -> tuple[Parameter, ...]:
    """The decoder's parameters as they would be filled; raises what loading would raise, but for damaged values."""
    decoder = Decoder(opened.spec, _NoBackend())
    for name, ours in opened.books.used.items():
        fill(decoder, opened, name, ours, _blank(opened.table[name]))
    finish(decoder, opened)
    return decoder.parameters()


def _blank(info: TensorInfo) -> Tensor:
    """A tensor without storage of the shape that reading would give."""
    if info.kind in BLOCK_BYTES:
        weights, num_bytes = BLOCK_BYTES[info.kind]
        shape = (*info.shape[:-1], info.shape[-1] // weights * num_bytes)
        return torch.empty(shape, dtype=torch.uint8, device="meta")
    return torch.empty(info.shape, dtype=FLOAT_DTYPES.get(info.kind, torch.float32), device="meta")
