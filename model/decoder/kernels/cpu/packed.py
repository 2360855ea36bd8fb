"""A weight in the interleaved form of layout.h.

Knows which form a kind of weight gets; the moving is done in C++, the meaning of blocks is GGUF's.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from model.decoder.dequantise import dequantise_weight
from model.decoder.kernels.cpu.structs import FORMATS, QUANTISED_KINDS
from model.decoder.weights import RawWeight

_FORM_OF = {"Q4_0": "nibble", "Q4_1": "nibble", "Q5_0": "byte", "Q5_1": "byte", "Q8_0": "byte_signed"}
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class PackedWeight:
    """`form` is a key of structs.FORMATS; `data` uint8, its layout is layout.h's."""

    form: str
    data: Tensor
    out_features: int
    in_features: int

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self.data.numel()


def pack(library: ctypes.CDLL, weight: RawWeight, exact: bool) -> PackedWeight:
    """`exact`: everything as float32. Otherwise quantised groups stay as they are (5 bits are widened to 8),
    float16 stays, float32 becomes bfloat16."""
    if weight.kind in QUANTISED_KINDS and not exact:
        kind, form = QUANTISED_KINDS[weight.kind], _FORM_OF[weight.kind]
        source = weight.data.contiguous()
    else:
        source = dequantise_weight(weight).contiguous() if weight.kind in QUANTISED_KINDS else weight.data
        source = source.contiguous()
        kept = "F32" if weight.kind in QUANTISED_KINDS else weight.kind
        source = source.to(_DTYPES[kept])
        kind = FORMATS[kept]
        form = "F32" if exact else ("F16" if kept == "F16" else "BF16")
    out, inner = weight.out_features, weight.in_features
    size = library.es_packed_bytes(FORMATS[form], out, inner)
    data = torch.empty(size, dtype=torch.uint8)
    library.es_pack(kind, FORMATS[form], source.data_ptr(), data.data_ptr(), out, inner)
    return PackedWeight(form, data, out, inner)
