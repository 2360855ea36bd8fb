"""ALiBi: a penalty on scores that grows with distance (Press et al. 2021, arXiv:2108.12409).

Knows the slopes; the distances, virtual ones for sink keys, are the kernels' business.
"""

import math

import torch
from torch import Tensor


def alibi_slopes(heads: int, maximum: float = 8.0, scale: float = 1.0) -> Tensor:
    """float64 [heads]: scale * 2 ** (-maximum * i / heads), i = 1 .. heads.

    For other than powers of two the series of the power below comes first, then every second slope of the
    next one's, as the original release has it.
    """
    power = 1 << math.floor(math.log2(heads))
    series = _series(power, maximum)
    if power < heads:
        series = torch.cat((series, _series(2 * power, maximum)[::2][: heads - power]))
    return series * scale


def _series(count: int, maximum: float) -> Tensor:
    return torch.pow(2.0, -maximum * torch.arange(1, count + 1, dtype=torch.float64) / count)
