"""The paged cache of the CPU kernels: one piece of memory a layer, cut into blocks.

Knows blocks and bytes; the layout inside a block is attention.h's, who uses which block is the engine's.
"""

import torch
from torch import Tensor

from model.decoder.spec import DecoderSpec


class CpuStore:
    """A tensor [blocks, bytes a block] for each layer: float16, or float32 in float32 mode."""

    def __init__(self, spec: DecoderSpec, num_blocks: int, block_size: int, half: bool) -> None:
        if block_size % 8:
            raise ValueError(f"the CPU kernels need a block size that is a multiple of 8, not {block_size}")
        self.block_size = block_size
        self.half = half
        element = 2 if half else 4
        # torch.empty: pages nobody has written yet take no memory; the kernels never use unwritten slots.
        self.layers: list[Tensor] = [
            torch.empty(
                num_blocks,
                2 * layer.attention.kv_heads * (-(-layer.attention.head_dim // 8) * 8) * block_size * element,
                dtype=torch.uint8,
            )
            for layer in spec.layers
        ]
        self.num_bytes = sum(layer.numel() for layer in self.layers)
        self.pointers = torch.tensor([layer.data_ptr() for layer in self.layers], dtype=torch.int64)
        self.block_bytes = torch.tensor([layer.shape[1] for layer in self.layers], dtype=torch.int64)

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block in all layers."""
        for layer in self.layers:
            layer[target].copy_(layer[source])

    def spoil(self, block: int) -> None:
        """Fill a block with NaN (tests: nothing may look at a block that was given back)."""
        for layer in self.layers:
            layer[block].fill_(255)
