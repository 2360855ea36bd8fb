"""Batch invariance of the reference backend: in float32 a row's logits are bit-equal whatever is computed beside it.

On odd toys; the engine's tests hold the same on the default model, with real chunks, preemption and prefix hits.
"""

import pytest
import torch

from model.decoder.kernels.reference import ReferenceBackend
from tests.parity import tiny
from tests.parity.paged import Paged, Stream

IDS = [(7 * place * place + 3) % 100 + 2 for place in range(90)]
POLICIES = {"none": {}, "sinks": {"sinks": 4, "window": 12}, "window": {"window": 12}}


@pytest.fixture(scope="module", params=["llama", "mpt", "gemma2", "falcon-7b"])
def decoder(request):
    backend = ReferenceBackend("cpu", "float32")
    return tiny.build(request.param).decoder(backend), backend


def chunked(decoder, chunk: int, neighbours: int = 0, block_size: int = 4, **policy) -> torch.Tensor:
    """Logits of IDS run in chunks, beside that many other sequences of other lengths and policies."""
    model, backend = decoder
    paged = Paged(model, backend, num_blocks=400, block_size=block_size)
    stream = Stream(**policy)
    others = [Stream(**(POLICIES["sinks"] if n % 2 else {})) for n in range(neighbours)]
    rows = []
    for start in range(0, len(IDS), chunk):
        beside = [(other, IDS[n : n + 1 + (n % 3) * (start == 0)]) for n, other in enumerate(others)]
        middle = len(beside) // 2
        parts = [*beside[:middle], (stream, IDS[start : start + chunk]), *beside[middle:]]
        rows.append(paged.step(parts)[middle])
    return torch.cat(rows)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_chunks_and_neighbours_change_no_bit(decoder, policy):
    whole = chunked(decoder, len(IDS), **POLICIES[policy])
    for chunk, neighbours in ((7, 0), (1, 0), (1, 3), (16, 31), (33, 1)):
        assert torch.equal(chunked(decoder, chunk, neighbours, **POLICIES[policy]), whole), (chunk, neighbours)
