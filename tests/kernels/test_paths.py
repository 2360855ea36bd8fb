"""AVX-512 gives AVX2's bits, products and attention: by emulation where the processor cannot, on it where it can."""

import re
import shutil
import subprocess

import pytest
import torch

from model.decoder.kernels.cpu import build
from model.decoder.kernels.cpu.library import load_library
from tests.kernels import paths
from tests.kernels.probe import Probe, plain_spec, raw, run, tokens
from tests.kernels.test_attention import attention, ragged, results
from tests.kernels.test_products import QUANTISED, ROWS, bfloat, product, uneven

FLOATS = ("F32", "F16", "BF16")


def on_both(dtype, compute):
    """What `compute(backend)` gives on each path of the library that has both."""
    results = []
    for name in paths.LEVELS:
        backend = paths.backend("avx512", dtype)
        assert paths.choose(backend._library, name)
        results.append(compute(backend))
    return results


def both(dtype, probe_of, inputs):
    """What each path makes of a probe."""
    return on_both(dtype, lambda backend: run(backend, probe_of(backend), inputs))


def same_bits(one, other):
    """Equal bit for bit; of what is no number only that it is none."""
    assert torch.equal(one.isnan(), other.isnan())
    assert torch.equal(one.nan_to_num(0.0).view(torch.int32), other.nan_to_num(0.0).view(torch.int32))


@pytest.mark.parametrize("kind", [*QUANTISED, *FLOATS])
@pytest.mark.parametrize(("out", "inner"), [(1, 32), (8, 64), (17, 96), (40, 576), (137, 64), (64, 2048)])
def test_products_have_the_bits_of_avx2(kind, out, inner):
    torch.manual_seed(out + inner)
    table, weight, bias = torch.randn(513, inner), raw(torch.randn(out, inner), kind), torch.randn(out)
    for rows in ROWS:
        same_bits(*both("auto", lambda b: product(b, table, [weight], [bias]), tokens(range(rows))))


@pytest.mark.parametrize(("out", "inner"), [(1, 1), (15, 33), (50, 7), (16, 100)])
def test_odd_widths_in_float32_mode_have_the_bits_of_avx2(out, inner):
    torch.manual_seed(out)
    table, weight = torch.randn(513, inner), raw(torch.randn(out, inner))
    for rows in ROWS:
        same_bits(*both("float32", lambda b: product(b, table, [weight]), tokens(range(rows))))


@pytest.mark.parametrize("kind", QUANTISED)
def test_the_largest_weights_and_rows_have_the_bits_of_avx2(kind):
    """Nothing saturates: all products of a group as large as they get, with either sign."""
    weight = torch.tensor([1.0, -1.0]).repeat(8, 16).repeat_interleave(2, dim=0)
    weight[1::2] = weight[0::2].abs() * torch.tensor([1.0, -0.5]).repeat(16)
    table = torch.stack([torch.full((32,), 127.0), torch.full((32,), -127.0), weight[0] * 127.0, weight[0] * -127.0])
    first, second = both("auto", lambda b: product(b, table, [raw(weight, kind)]), tokens(range(4)))
    same_bits(first, second)
    assert first.abs().max() > 32 * 100


@pytest.mark.parametrize("kind", QUANTISED)
def test_rows_whose_groups_differ_in_size_have_the_bits_of_avx2(kind):
    torch.manual_seed(6)
    table, weight = uneven(21, 256), raw(torch.randn(33, 256), kind)
    same_bits(*both("auto", lambda b: product(b, table, [weight]), tokens(range(21))))


def test_columns_of_a_wider_result_and_sums_on_top_have_the_bits_of_avx2():
    """Several weights side by side, the last tiles of each partial; then a product added to its own input."""
    torch.manual_seed(5)
    table = bfloat(29, 64)
    weights = [raw(torch.randn(10, 64), "Q4_1"), raw(torch.randn(21, 64), "Q8_0"), raw(bfloat(3, 64), "BF16")]
    same_bits(*both("auto", lambda b: product(b, table, weights, [torch.ones(10), None, None]), tokens(range(29))))
    square = raw(torch.randn(64, 64), "Q5_1")

    def residual(backend):
        rows, weight = backend.pack(raw(table), lookup=True), backend.pack(square)

        def forward(ops):
            x = ops.embed(rows, 1.0)
            return ops.select_rows(ops.add(x, ops.linear(x, [weight], [None])))

        return Probe(forward, plain_spec())

    same_bits(*both("auto", residual, tokens(range(29))))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38, 1e-42])
@pytest.mark.parametrize("kind", [*QUANTISED, *FLOATS])
def test_what_is_hardly_a_number_is_the_same_on_both(kind, bad):
    torch.manual_seed(8)
    table = torch.randn(12, 64)
    table[3, 17] = bad
    weight = raw(torch.randn(24, 64), kind)
    first, second = both("auto", lambda b: product(b, table, [weight]), tokens(range(12)))
    same_bits(first, second)
    assert first[[0, 1, 2, 4, 11]].isfinite().all()


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 8), (5, 1, 20), (30, 1, 16), (2, 1, 80)]
)
def test_attention_has_the_bits_of_avx2(dtype, heads, kv_heads, head_dim):
    """Many rows and few, tiles that begin and end anywhere, windows and sinks; unused slots are NaN."""
    torch.manual_seed(head_dim)
    lengths, news = (330, 34, 2, 290, 77, 16), (64, 33, 1, 1, 7, 3)
    table = torch.randn(sum(lengths), (heads + 2 * kv_heads) * head_dim)

    def compute(backend, rule, policy):
        probe = attention(backend, heads, kv_heads, head_dim, rule, table)
        return results(backend, probe, ragged(lengths, news, 16, **policy))

    for policy in ({}, {"sinks": 20, "window": 150}):
        for rule in ("plain", "all"):
            first, second = on_both(dtype, lambda backend, r=rule, p=policy: compute(backend, r, p))
            same_bits(first, second)
            assert first.isfinite().all()


def test_the_processor_itself_agrees_with_its_avx2():
    """The same on real registers; the other tests of this folder then run on them too."""
    library = load_library()
    if library is None or not paths.processor_has_avx512():
        # Nothing can be loosened by this: the emulated run of the same comparisons never skips where its headers are.
        pytest.skip("this processor offers no AVX-512 with VNNI: only its emulation is tested here")
    assert paths.library_of("avx512") is library
    torch.manual_seed(9)
    table, weight = torch.randn(64, 576), raw(torch.randn(48, 576), "Q4_1")
    same_bits(*both("auto", lambda b: product(b, table, [weight]), tokens(range(64))))


def test_only_functions_of_the_avx512_path_hold_its_instructions():
    """What every processor runs must not contain them: an inline function compiled twice could."""
    if shutil.which("objdump") is None:
        pytest.skip("objdump is missing: apt-get install binutils (CI does), then run this again")
    try:
        built = build.build()
    except build.Unavailable as why:
        pytest.skip(str(why))  # no compiler or no AVX2: then there is no library to look into
    text = subprocess.run(["objdump", "-dC", "--no-show-raw-insn", built], capture_output=True, text=True, check=True)
    inside, holders = "", set()
    for line in text.stdout.splitlines():
        if line.endswith(">:"):
            inside = line.split("<", 1)[1][:-2]
        elif re.search(r"%zmm|%[xy]mm(1[6-9]|2\d|3[01])|%k[1-7]", line):
            holders.add(inside)
    assert holders
    assert all("es::avx512::" in name for name in holders), holders
