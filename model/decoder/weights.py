"""RawWeight: a parameter as a checkpoint holds it, before a backend packs it.

Knows bytes and shapes; no files, no families, no arithmetic.
"""

from dataclasses import dataclass

from torch import Tensor

# Quantised types by their GGUF names: (weights in a block, bytes in a block).
BLOCK_BYTES = {"Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34)}


@dataclass(frozen=True)
class RawWeight:
    """A matrix [out_features, in_features], row-major.

    `kind` is "F32", "F16", "BF16" (then `data` is a float tensor of that shape) or a quantised type's GGUF
    name (then `data` is uint8 [out_features, in_features / block * bytes a block], the file's own bytes).
    """

    kind: str
    data: Tensor
    out_features: int
    in_features: int
