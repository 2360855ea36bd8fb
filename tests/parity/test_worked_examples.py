"""The worked examples that this project grew from, each against the code it explains.

Numbers are given to so many digits; the tolerance is half a unit of the last. Those about sampling stand with
the sampler's tests, the one about BPE with the tokenizer's.
"""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from model.decoder.alibi import alibi_slopes
from model.decoder.attention import Attention
from model.decoder.decoder import Decoder, sinusoids
from model.decoder.inputs import NO_WINDOW, DecoderInput
from model.decoder.kernels import reference_attention
from model.decoder.kernels.reference import ReferenceBackend
from model.decoder.kernels.reference_ops import ROWS, Step
from model.decoder.parameters import ParameterTable
from model.decoder.rope import inverse_frequencies, rotate, rotation
from model.decoder.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
    PositionSpec,
    RopeSpec,
)
from tests.parity.paged import Paged, Stream
from tests.parity.test_retention import toy

BACKEND = ReferenceBackend("cpu", "float64")


def close(ours: Tensor, given: list, unit: float) -> bool:
    """Within half a unit of the last digit given."""
    return bool((ours - torch.tensor(given, dtype=torch.float64)).abs().max() <= unit / 2)


def one_step(tokens: int, causal: bool = True, block_size: int = 4) -> Step:
    """A step of one sequence of `tokens`; not causal: each token as a sequence of its own that sees all of them."""
    place = torch.arange(tokens)
    last = torch.full((tokens,), tokens - 1)
    count = 1 if causal else tokens
    inputs = DecoderInput(
        ids=torch.zeros(tokens, dtype=torch.int64),
        positions=place if causal else last,
        slots=place,
        query_start=torch.tensor([0, tokens] if causal else range(tokens + 1), dtype=torch.int32),
        block_tables=torch.arange(32, dtype=torch.int32).expand(count, -1),
        sink_blocks=torch.zeros(count, dtype=torch.int32),
        recent_base=torch.zeros(count, dtype=torch.int64),
        sinks=torch.zeros(count, dtype=torch.int32),
        windows=torch.full((count,), NO_WINDOW),
        logit_rows=place,
    )
    spec = DecoderSpec("toy", 1, 1, 1, (LayerSpec(AttentionSpec(1, 1, 16), MlpSpec(1)),))
    return Step(inputs, BACKEND.new_kv_store(spec, 32, block_size), BACKEND.device, torch.float64)


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float = 1.0) -> Tensor:
    """Our kernel on one head without positions: [tokens, head_dim]."""
    tokens, head_dim = q.shape
    step = one_step(tokens, causal)
    rows = -(-tokens // ROWS) * ROWS - tokens
    q, k, v = (functional.pad(part.to(torch.float64), (0, 0, 0, rows)) for part in (q, k, v))
    sizes = {"layer": 0, "heads": 1, "kv_heads": 1, "head_dim": head_dim}
    turned = step.rotate_and_store(q, k, v, rope=None, **sizes)
    rest = {"window": None, "softcap": None, "alibi_slopes": None, "sink_logits": None}
    return step.attend(turned, **sizes, scale=scale, **rest)[:tokens]


Q = K = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
V = torch.tensor([[10.0, 0.0], [0.0, 10.0], [5.0, 5.0]])


def test_attention_by_hand():
    weights = torch.softmax((Q @ K.T) / math.sqrt(2), dim=-1)
    assert (Q @ K.T).tolist() == [[1, 0, 1], [0, 1, 1], [1, 1, 2]]
    assert close(weights, [[0.401, 0.198, 0.401], [0.198, 0.401, 0.401], [0.248, 0.248, 0.503]], 0.0011)
    assert close(attention(Q, K, V, scale=2**-0.5), [[6.0, 4.0], [4.0, 6.0], [5.0, 5.0]], 0.1)


def test_attention_by_hand_with_the_causal_mask():
    assert close(attention(Q, K, V, causal=True, scale=2**-0.5), [[10, 0], [3.3, 6.7], [5, 5]], 0.1)
    # The mask comes before the softmax: weights still sum to one, so values of one give one.
    assert close(attention(Q, K, torch.ones(3, 2), causal=True), [[1, 1]] * 3, 1e-12)


def test_without_positions_and_mask_a_permutation_only_permutes():
    x = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(7, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(attention(x[order], x[order], x[order]), attention(x, x, x)[order], atol=1e-12)
    assert not torch.allclose(
        attention(x[order], x[order], x[order], causal=True), attention(x, x, x, causal=True)[order]
    )


def test_scale_brings_the_variance_of_scores_to_one():
    spec = AttentionSpec(heads=1, kv_heads=1, head_dim=64)
    scale = Attention(ParameterTable(BACKEND), "a", spec, 64, 0)._scale
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(100_000, 64, generator=generator) for _ in range(2))
    products = (q * k).sum(dim=1)
    assert float(products.var()) == pytest.approx(64, rel=0.03)
    assert float((products * scale).var()) == pytest.approx(1, rel=0.03)


def test_softmax_subtracts_the_maximum():
    values = torch.eye(2)
    high = attention(torch.tensor([[0.0], [1.0]]), torch.tensor([[1000.0], [1001.0]]), values)[1]
    low = attention(torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [1.0]]), values)[1]
    assert torch.equal(high, low)


@pytest.mark.parametrize("tile", [8, 16, 40, 64, 1024])
def test_online_softmax_equals_the_plain_one(tile, monkeypatch):
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(100, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    plain = torch.softmax((q @ k.T).masked_fill(torch.ones(100, 100).triu(1).bool(), -torch.inf), dim=-1) @ v
    monkeypatch.setattr(reference_attention, "_TILE", tile)
    assert torch.allclose(attention(q, k, v, causal=True), plain, atol=1e-13)


def relative_bucket(distance: int, buckets: int = 32, maximum: int = 128) -> int:
    """T5's bucket for a key `distance` tokens behind its query (Raffel et al. 2020, arXiv:1910.10683, section 2.1).

    The near half has a bucket for each distance; the far half grows logarithmically up to `maximum`.
    """
    exact = buckets // 2
    if distance < exact:
        return max(distance, 0)
    place = math.log(distance / exact) / math.log(maximum / exact) * (buckets - exact)
    return min(exact + int(place), buckets - 1)


def test_relative_buckets():
    assert [relative_bucket(distance) for distance in range(16)] == list(range(16))
    assert [relative_bucket(distance) for distance in (16, 17, 20, 32, 64, 127, 128, 100_000)] == [
        *(16, 16, 17, 21, 26, 31, 31, 31)
    ]
    buckets = [relative_bucket(distance) for distance in range(300)]
    assert buckets == sorted(buckets)
    assert set(buckets) == set(range(32))


def test_sinusoids_shift_by_a_fixed_rotation():
    table = sinusoids(PositionSpec("sinusoidal", count=50), 16)
    sines, cosines = table[:, :8], table[:, 8:]
    shift = 7
    angle = torch.atan2(sines[shift], cosines[shift])  # position 7 itself, the angle of each frequency
    turned_sines = sines * angle.cos() + cosines * angle.sin()
    turned_cosines = cosines * angle.cos() - sines * angle.sin()
    assert torch.allclose(sines[shift:], turned_sines[:-shift], atol=1e-12)
    assert torch.allclose(cosines[shift:], turned_cosines[:-shift], atol=1e-12)
    assert table[0].tolist() == [0.0] * 8 + [1.0] * 8


def turned(x: list[float], position: int, rope: RopeSpec) -> Tensor:
    angles = rotation(rope, torch.tensor([position]), inverse_frequencies(rope), torch.float64)
    return rotate(torch.tensor([[x]], dtype=torch.float64), rope, *angles)[0, 0]


@pytest.mark.parametrize("layout", ["halves", "pairs"])
def test_rope_by_hand(layout):
    rope = RopeSpec(dim=2, layout=layout)
    for shift in (0, 100):
        q, k = turned([1, 0], 1 + shift, rope), turned([1, 0], 4 + shift, rope)
        assert float(q @ k) == pytest.approx(math.cos(3), abs=1e-12)
    assert close(turned([1, 0], 1, rope), [0.540, 0.841], 0.001)
    assert close(turned([1, 0], 4, rope), [-0.654, -0.757], 0.001)
    r1, r4 = (torch.stack([turned([1, 0], p, rope), turned([0, 1], p, rope)], dim=1) for p in (1, 4))
    assert close(r1.T @ r4, [[-0.990, -0.141], [0.141, -0.990]], 0.001)


def test_rope_wavelengths_and_layouts():
    frequencies = inverse_frequencies(RopeSpec(dim=64, base=10_000.0))
    wavelengths = 2 * math.pi / frequencies
    assert float(wavelengths[0]) == pytest.approx(2 * math.pi)
    assert float(wavelengths[-1]) == pytest.approx(2 * math.pi * 10_000 ** (62 / 64))
    x = [1.0, 2.0, 3.0, 4.0]
    halves, pairs = (turned(x, 5, RopeSpec(dim=4, layout=layout)) for layout in ("halves", "pairs"))
    assert torch.allclose(pairs[[0, 2, 1, 3]], turned([1.0, 3.0, 2.0, 4.0], 5, RopeSpec(dim=4)))
    assert not torch.allclose(halves, pairs)


def test_values_are_never_rotated():
    step = one_step(8)
    rows = torch.randn(8, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    step.rotate_and_store(rows, rows, rows, layer=0, heads=1, kv_heads=1, head_dim=16, rope=RopeSpec(dim=16))
    assert torch.equal(step._store.values[0][:2].reshape(8, 16), rows)
    assert not torch.equal(step._store.keys[0][:2].reshape(8, 16), rows)


def test_alibi_slopes():
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(4).tolist() == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]
    twelve = [*(2.0**-i for i in range(1, 9)), *(2.0**-i for i in (0.5, 1.5, 2.5, 3.5))]
    assert alibi_slopes(12).tolist() == pytest.approx(twelve, rel=1e-15)


def test_norms_by_hand():
    step = one_step(8)
    x = torch.tensor([[2.0, -1.0, 0.0, 3.0]], dtype=torch.float64)
    layer, rms = (step.norm(x, NormSpec(kind=kind, eps=0.0), None, None) for kind in ("layer", "rms"))
    assert close(layer, [[0.63, -1.26, -0.63, 1.26]], 0.01)
    assert close(rms, [[1.07, -0.53, 0.0, 1.60]], 0.01)
    given = torch.tensor([[60.0, 70.0, 90.0]], dtype=torch.float64)
    assert close(step.norm(given, NormSpec(kind="layer", eps=0.0), None, None), [[-1.07, -0.27, 1.34]], 0.01)


def test_activations():
    step = one_step(8)
    x = torch.linspace(-8, 8, 16_001, dtype=torch.float64).unsqueeze(0)
    by_hand = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    assert torch.allclose(step.activate(x, "gelu_tanh", False), by_hand, atol=1e-12)
    assert float(step.activate(x, "gelu_tanh", False).min()) == pytest.approx(-0.17, abs=0.005)
    assert torch.allclose(step.activate(x, "silu", False), x * torch.sigmoid(x), atol=1e-12)
    both = torch.cat((x, 2 * x), dim=1)
    assert torch.allclose(step.activate(both, "silu", True), x * torch.sigmoid(x) * 2 * x, atol=1e-12)


def counted(spec: DecoderSpec, part: str = "") -> int:
    return sum(math.prod(p.shape) for p in Decoder(spec, BACKEND).parameters() if part in p.name)


def test_a_gate_of_two_thirds_keeps_the_count():
    def count(mlp: MlpSpec) -> int:
        return counted(DecoderSpec("toy", 1, 768, 1, (LayerSpec(AttentionSpec(1, 1, 1), mlp),)), "mlp")

    assert count(MlpSpec(width=768 * 8 // 3, gated=True)) == count(MlpSpec(width=768 * 4))


def test_counting_parameters_and_work():
    width = 4096
    layer = LayerSpec(AttentionSpec(32, 32, 128), MlpSpec(16_384))
    spec = DecoderSpec("toy", 128_000, width, 1, (layer,) * 32, tied_head=True)
    assert counted(spec, "layers.0.attention") == 4 * width**2 == pytest.approx(67.1e6, rel=0.001)
    assert counted(spec, "layers.0.mlp") == 8 * width**2 == pytest.approx(134e6, rel=0.005)
    assert counted(spec, "embedding") == pytest.approx(524e6, rel=0.001)
    assert counted(spec) == pytest.approx(7e9, rel=0.01)
    # A token's linear work in a layer is 2 FLOP a parameter; its attention over n keys 2 for scores, 2 for values.
    linear = 2 * counted(spec, "layers.0")
    assert linear / (4 * width) == 6 * width == pytest.approx(24_600, rel=0.002)


def test_gpt2_small_has_124_million_parameters():
    norm = NormSpec("layer", bias=True)
    heads = AttentionSpec(12, 12, 64, qkv_bias=True, out_bias=True)
    layer = LayerSpec(heads, MlpSpec(3072, "gelu_tanh", bias=True), pre_attention=norm, pre_mlp=norm)
    positions = PositionSpec("learned", count=1024)
    spec = DecoderSpec("toy", 50_257, 768, 1024, (layer,) * 12, norm, positions=positions, tied_head=True)
    assert counted(spec) == 124_439_808


def test_the_cache_changes_nothing_but_the_work():
    """Token by token with a cache: the logits of a full recompute. Only keys and values are kept, never queries."""
    decoder = toy(BACKEND)
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    paged, stream = Paged(decoder, BACKEND), Stream()
    cached = torch.cat([paged.step([(stream, [token])])[0] for token in ids])
    whole = [Paged(decoder, BACKEND).step([(Stream(), ids[: end + 1])])[0][-1] for end in range(len(ids))]
    assert torch.allclose(cached, torch.stack(whole), atol=1e-12)
    per_token = sum(2 * layer.attention.kv_heads * 8 for layer in decoder.spec.layers)  # heads of 6 padded to 8
    assert paged.store.num_bytes == 96 * 4 * per_token * 8
