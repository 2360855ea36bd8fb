"""Row-wise ops and what is fused around products, against the reference in float64."""

import pytest
import torch

from model.decoder.spec import NormSpec
from tests.kernels.probe import Probe, raw, run, tokens

WIDTHS = (8, 33, 96, 576)


def compare(exact, reference, build, width, rows=7, tolerance=2e-6):
    """`build(ops, x, backend)` on both backends, for random rows of `width`."""
    torch.manual_seed(width)
    table = raw(torch.randn(rows, width) * 3)
    results = []
    for backend in (exact, reference):
        packed = backend.pack(table, lookup=True)
        probe = Probe(lambda ops, packed=packed, backend=backend: build(ops, ops.embed(packed, 1.0), backend))
        results.append(run(backend, probe, tokens(range(rows))).double())
    torch.testing.assert_close(results[0], results[1], rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(("weight", "bias"), [(True, True), (True, False), (False, False)])
def test_norms(exact, reference, width, kind, weight, bias):
    spec = NormSpec(kind, 1e-5, weight, bias)
    w, b = torch.randn(width), torch.randn(width)

    def build(ops, x, backend):
        return ops.norm(x, spec, backend.place(w) if weight else None, backend.place(b) if bias else None)

    compare(exact, reference, build, width)


def test_a_norm_in_groups(exact, reference):
    w = torch.randn(24)
    compare(exact, reference, lambda ops, x, b: ops.norm(x, NormSpec(), b.place(w), None, 4), 96)


@pytest.mark.parametrize("kind", ["relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("width", [16, 66, 600])
def test_activations(exact, reference, kind, gated, width):
    compare(exact, reference, lambda ops, x, b: ops.activate(x, kind, gated), width)


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("parallel", [False, True])
def test_norm_product_activation_and_sum_fused(exact, reference, rows, parallel):
    """The shape of a block without attention: fused on the tape, one by one in the reference."""
    torch.manual_seed(1)
    up, down, out = (raw(torch.randn(*shape) / 8) for shape in ((100, 64), (64, 50), (64, 64)))
    weight, bias = torch.randn(64), torch.randn(64)

    def build(ops, x, backend):
        pack, place = backend.pack, backend.place
        normed = ops.norm(x, NormSpec("layer", bias=True), place(weight), place(bias))
        mixed = ops.linear(normed, [pack(out)], [place(bias)])
        if not parallel:
            x = ops.add(x, mixed)
            normed = ops.norm(x, NormSpec(), place(weight), None)
        fed = ops.linear(ops.activate(ops.linear(normed, [pack(up)], [None]), "silu", True), [pack(down)], [None])
        return ops.softcap(ops.add(ops.add(x, mixed), fed) if parallel else ops.add(x, fed), 5.0)

    compare(exact, reference, build, 64, rows, tolerance=2e-5)


def test_single_values(exact, reference):
    table = torch.randn(40, 48)
    widen = [raw(torch.randn(48, 20) / 5), raw(torch.randn(48, 28) / 5)]

    def build(ops, x, backend):
        x = ops.add_positions(x, backend.place(table), 2)
        left, right = ops.split(x, [20, 28])
        narrow = ops.norm(left, NormSpec(), None, None)
        both = ops.add(
            ops.linear(narrow, [backend.pack(widen[0])], [None]), ops.linear(right, [backend.pack(widen[1])], [None])
        )
        x = ops.clip(ops.scale(ops.add(x, both), 0.7), 2.5)
        return ops.softcap(ops.select_rows(x), 1.5)

    compare(exact, reference, build, 48)


def test_only_selected_rows_come_out(exact):
    table = exact.pack(raw(torch.arange(40.0).reshape(10, 4)), lookup=True)
    inputs = tokens(range(10))
    inputs = type(inputs)(**{**vars(inputs), "logit_rows": torch.tensor([0, 3, 9])})
    got = run(exact, Probe(lambda ops: ops.scale(ops.select_rows(ops.embed(table, 1.0)), 2.0)), inputs)
    assert got.tolist() == [[0.0, 2.0, 4.0, 6.0], [24.0, 26.0, 28.0, 30.0], [72.0, 74.0, 76.0, 78.0]]
