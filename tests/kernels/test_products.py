"""Products of rows and weights: every kind against exact arithmetic, odd shapes, each row alone bit for bit."""

import pytest
import torch

from model.decoder.dequantise import dequantise_weight
from tests.kernels.probe import Probe, raw, run, tokens

QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 13, 31, 64, 129, 513)


def product(backend, table, weights, biases=None):
    """The probe: rows of `table` times `weights`, side by side."""
    packed = [backend.pack(raw(table), lookup=True)] + [backend.pack(weight) for weight in weights]
    biases = [None if bias is None else backend.place(bias) for bias in biases or [None] * len(weights)]
    return Probe(lambda ops: ops.linear(ops.select_rows(ops.embed(packed[0], 1.0)), packed[1:], biases))


def bfloat(*shape):
    """Random numbers that bfloat16 holds exactly, so that both backends embed the same."""
    return torch.randn(*shape).to(torch.bfloat16).to(torch.float32)


def int8_rows(x):
    """Rows as the kernels see them: a scale a row, whole steps of it a group of 32, 127 values to each side."""
    groups = x.reshape(x.shape[0], -1, 32)
    top = groups.abs().amax(dim=2, keepdim=True)
    largest = top.amax(dim=1, keepdim=True)
    steps = (top * (torch.tensor(2047.0) / largest)).ceil().clamp(1, 2047)
    scale = largest / (torch.tensor(127.0) * 2047)
    values = torch.where(largest > 0, groups * (1 / (scale * steps)), torch.zeros(())).round()
    assert values.abs().max() <= 127
    return (values.double() * (scale.double() * steps.double()).nan_to_num()).reshape(x.shape)


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize(("out", "inner"), [(1, 32), (17, 96), (40, 576), (129, 64)])
def test_quantised_weights_times_int8_rows(served, kind, out, inner):
    torch.manual_seed(out)
    table, weight = bfloat(513, inner), raw(torch.randn(out, inner), kind)
    bias = torch.randn(out)
    probe = product(served, table, [weight], [bias])
    for rows in ROWS:
        expected = int8_rows(table[:rows]) @ dequantise_weight(weight).double().T + bias
        got = run(served, probe, tokens(range(rows)))
        assert got.shape == (rows, out)
        torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=2e-5 * inner**0.5)


def uneven(rows, inner):
    """Rows whose groups of 32 differ by up to nine orders of magnitude; some groups, and the second row, are zero."""
    size = 10 ** (torch.rand(rows, inner // 32, 1) * 9 - 6)
    size[torch.rand(rows, inner // 32, 1) < 0.2] = 0
    size[1] = 0
    return (torch.randn(rows, inner // 32, 32) * size).reshape(rows, inner).to(torch.bfloat16).to(torch.float32)


@pytest.mark.parametrize("kind", QUANTISED)
def test_rows_whose_groups_differ_in_size(served, kind):
    torch.manual_seed(4)
    table, weight = uneven(40, 256), raw(torch.randn(33, 256), kind)
    exact = table.double() @ dequantise_weight(weight).double().T
    expected = int8_rows(table) @ dequantise_weight(weight).double().T
    got = run(served, product(served, table, [weight]), tokens(range(40))).double()
    size = table.abs().amax(dim=1, keepdim=True).double()
    assert ((got - expected).abs() <= 1e-5 * 256**0.5 * size).all()
    assert ((got - exact).abs() <= 0.03 * 256**0.5 * size).all()
    assert (got[1] == 0).all()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(("out", "inner"), [(1, 1), (16, 33), (50, 100), (7, 576)])
def test_float_weights(served, exact, kind, out, inner):
    torch.manual_seed(inner)
    table, weight = bfloat(513, inner), raw(bfloat(out, inner), kind)
    for backend in (served, exact):
        probe = product(backend, table, [weight])
        for rows in ROWS:
            expected = table[:rows].double() @ weight.data.double().T
            got = run(backend, probe, tokens(range(rows)))
            torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=2e-6 * inner)


@pytest.mark.parametrize("kind", [*QUANTISED, "F16", "BF16"])
def test_a_row_has_the_same_bits_in_any_company(served, kind):
    torch.manual_seed(3)
    table, weight = bfloat(513, 160), raw(torch.randn(45, 160), kind)
    probe = product(served, table, [weight])
    whole = run(served, probe, tokens(range(513)))
    for rows in ROWS:
        first = torch.randint(0, 514 - rows, ()).item()
        part = run(served, probe, tokens(range(first, first + rows)))
        assert torch.equal(part, whole[first : first + rows]), f"{rows} rows from {first} on"


def test_a_row_has_the_same_bits_in_float32_mode(exact):
    torch.manual_seed(4)
    table, weight = torch.randn(300, 200), raw(torch.randn(45, 200))
    probe = product(exact, table, [weight])
    whole = run(exact, probe, tokens(range(300)))
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 50):
        assert torch.equal(run(exact, probe, tokens(range(100, 100 + rows))), whole[100 : 100 + rows])


def test_several_weights_of_different_kinds_share_their_rows(served):
    torch.manual_seed(5)
    table = bfloat(9, 64)
    weights = [raw(torch.randn(10, 64), "Q4_1"), raw(torch.randn(5, 64), "Q8_0"), raw(bfloat(3, 64), "BF16")]
    biases = [torch.randn(10), None, torch.randn(3)]
    got = run(served, product(served, table, weights, biases), tokens(range(9)))
    apart = [
        run(served, product(served, table, [w], [b]), tokens(range(9))) for w, b in zip(weights, biases, strict=True)
    ]
    assert torch.equal(got, torch.cat(apart, dim=1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_a_number_shows_and_stays_in_its_row(served, exact, bad):
    table = torch.ones(6, 64)
    table[2, 40] = bad
    weight = raw(torch.rand(20, 64) + 0.5, "Q4_1")
    for backend in (served, exact):
        got = run(backend, product(backend, table, [weight]), tokens(range(6)))
        assert not got[2].isfinite().any()
        assert got[[0, 1, 3, 4, 5]].isfinite().all()


@pytest.mark.parametrize("kind", [*QUANTISED, "F16", "BF16", "F32"])
def test_an_embedding_row_is_the_dequantised_row(served, exact, kind):
    torch.manual_seed(6)
    weight = raw(bfloat(37, 96), kind)
    for backend in (served, exact):
        table = backend.pack(weight, lookup=True)
        got = run(backend, Probe(lambda ops, table=table: ops.scale(ops.embed(table, 2.0), 0.5)), tokens([36, 0, 5, 5]))
        torch.testing.assert_close(got, dequantise_weight(weight)[[36, 0, 5, 5]], rtol=1e-6, atol=1e-6)


def test_one_thread_gives_the_bits_of_two(served):
    torch.manual_seed(7)
    table, weight = bfloat(64, 96), raw(torch.randn(200, 96), "Q4_1")
    probe = product(served, table, [weight])
    two = run(served, probe, tokens(range(64)))
    served._library.es_pool_start(1)
    try:
        assert torch.equal(run(served, probe, tokens(range(64))), two)
    finally:
        served._library.es_pool_start(2)
