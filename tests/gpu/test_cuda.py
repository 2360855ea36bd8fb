"""The decoder on a CUDA device: the same code in torch, held to what it computes on the CPU.

Skipped where there is no such device; nothing else in the suite needs one.
"""

import pytest
import torch

from model.decoder.kernels.select import choose
from tests.parity import tiny
from tests.parity.paged import Paged, Stream

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]

IDS = [(11 * place * place + 5) % 100 + 2 for place in range(60)]
POLICIES = [{}, {"sinks": 4, "window": 14}, {"window": 14}]


def streamed(model, device: str, dtype: str, policy: dict) -> torch.Tensor:
    backend = choose(device, dtype, "reference")
    paged, stream = Paged(model.decoder(backend), backend), Stream(**policy)
    other = Stream()
    parts = []
    for start in range(0, len(IDS), 13):
        parts.append(paged.step([(other, IDS[start : start + 1]), (stream, IDS[start : start + 13])])[1].cpu())
    return torch.cat(parts)


@pytest.mark.parametrize("policy", POLICIES, ids=["none", "sinks", "window"])
@pytest.mark.parametrize("name", ["llama", "gptj", "gemma3", "bloom", "falcon-40b", "exaone4"])
def test_equals_the_cpu(name, policy):
    model = tiny.build(name)
    expected = streamed(model, "cpu", "float32", policy)
    assert float((streamed(model, "cuda", "float32", policy) - expected).abs().max()) < 1e-3 * float(expected.std())
    served = streamed(model, "cuda", "auto", policy)  # bfloat16 there
    assert float((served - expected).abs().mean()) < 0.05 * float(expected.std())
