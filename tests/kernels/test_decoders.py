"""Whole decoders on the tape: every family's toy against the reference; batch invariance in the served precision."""

import pytest
import torch

from model.decoder.inputs import NO_WINDOW
from model.decoder.kernels.cpu import backend as cpu_backend
from tests.parity import tiny
from tests.parity.paged import Paged, Stream

IDS = [(7 * place * place + 3) % 100 + 2 for place in range(70)]
POLICIES = {"none": (0, NO_WINDOW), "sinks": (4, 12), "window": (0, 12)}


def logits(decoder, backend, cuts, policy="none", beside=0, block_size=8):
    """Logits of IDS run in pieces of these lengths, among other sequences of one to three tokens each."""
    paged = Paged(decoder, backend, num_blocks=300, block_size=block_size)
    stream = Stream(*POLICIES[policy])
    others = [Stream(*POLICIES["sinks" if n % 2 else "none"]) for n in range(beside)]
    rows, start = [], 0
    for length in cuts:
        parts = [(other, IDS[n : n + 1 + (n % 3) * (start == 0)]) for n, other in enumerate(others)]
        parts.insert(beside // 2, (stream, IDS[start : start + length]))
        rows.append(paged.step(parts)[beside // 2])
        start += length
    return torch.cat(rows)


@pytest.mark.parametrize("name", list(tiny.ROWS))
def test_every_family_equals_the_reference(exact, reference, name):
    toy = tiny.build(name)
    for policy in POLICIES:
        expected = logits(toy.decoder(reference), reference, (40, 1, 1, 28), policy)
        got = logits(toy.decoder(exact), exact, (40, 1, 1, 28), policy)
        spread = expected.std()
        assert (got - expected).abs().max() < 2e-4 * spread, policy


@pytest.mark.parametrize("name", ["llama", "mpt", "gemma2", "falcon-7b", "gpt2"])
@pytest.mark.parametrize("policy", list(POLICIES))
def test_chunks_and_neighbours_change_no_bit(served, exact, name, policy):
    toy = tiny.build(name)
    for backend in (served, exact):
        decoder = toy.decoder(backend)
        whole = logits(decoder, backend, (70,), policy)
        for cuts, beside in (((7,) * 10, 0), ((1,) * 70, 3), ((33, 30, 7), 31), ((69, 1), 1)):
            assert torch.equal(logits(decoder, backend, cuts, policy, beside), whole), (cuts, beside)
        assert torch.equal(logits(decoder, backend, (70,), policy, block_size=24), whole)


def test_a_step_too_large_is_cut_without_changing_a_bit(served, monkeypatch):
    decoder = tiny.build("llama").decoder(served)
    whole = logits(decoder, served, (70,), beside=5)
    monkeypatch.setattr(cpu_backend, "MOST_TOKENS", 16)
    assert torch.equal(logits(decoder, served, (70,), beside=5), whole)


def test_threads_change_no_bit(served):
    decoder = tiny.build("llama").decoder(served)
    whole = logits(decoder, served, (60, 1, 9), "sinks", beside=2)
    for threads in (1, 3):
        served._library.es_pool_start(threads)
        try:
            assert torch.equal(logits(decoder, served, (60, 1, 9), "sinks", beside=2), whole)
        finally:
            served._library.es_pool_start(2)


def test_logits_that_need_not_last_stay_in_one_place():
    made = cpu_backend.open_backend("auto", 1)
    assert made is not None
    one, other = made._room(3, 50), made._room(3, 50)
    assert one.data_ptr() != other.data_ptr(), "every step's logits are its own unless the caller says otherwise"
    made.lasting_rows = 8
    first = made._room(8, 50)
    assert [made._room(rows, 50).data_ptr() for rows in (1, 5, 8)] == [first.data_ptr()] * 3
    assert made._room(5, 50).shape == (5, 50)
    beyond = made._room(9, 50)
    assert beyond.data_ptr() != first.data_ptr(), "a step of many scored positions has memory of its own"
