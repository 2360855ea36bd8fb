"""Retention against its definition: a cache that holds sinks and recent keys only, numbered from 0 without gaps.

The published method rotates keys anew at their place in that cache. Here they stay rotated at their true position
and the query is turned twice; on toys in float64 both give the same scores.
"""

import math

import pytest
import torch
from torch import Tensor

from model.decoder.alibi import alibi_slopes
from model.decoder.decoder import Decoder
from model.decoder.inputs import DecoderInput
from model.decoder.kernels.reference import ReferenceBackend
from model.decoder.kernels.reference_ops import ROWS, Step
from model.decoder.rope import inverse_frequencies
from model.decoder.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec, RopeSpec
from tests.parity.paged import Paged, Stream

SINKS, WINDOW, BLOCK = 4, 12, 4
HEADS, KV_HEADS, DIM = 4, 2, SINKS + WINDOW  # a key's value is a unit vector, so attention gives its weights

ROPES = {
    "halves": RopeSpec(dim=DIM),
    "pairs": RopeSpec(dim=DIM, layout="pairs"),
    "partial": RopeSpec(dim=6, base=200.0),
    "alibi": None,
    "none": None,
}


def spec(kind: str) -> DecoderSpec:
    attention = AttentionSpec(HEADS, KV_HEADS, DIM, rope=ROPES[kind], alibi=kind == "alibi")
    layer = LayerSpec(attention, MlpSpec(8))
    return DecoderSpec("toy", vocabulary=8, width=HEADS * DIM, context=1 << 24, layers=(layer,))


def kept_positions(last: int) -> list[int]:
    """What a query at `last` may see: the sinks and the last WINDOW positions, itself included."""
    return [p for p in range(SINKS) if p <= last] + list(range(max(SINKS, last - WINDOW + 1), last + 1))


def paged_scores(kind: str, q: Tensor, keys: Tensor, last: int) -> Tensor:
    """Scores of the query at `last` for its kept keys, up to a constant a head, by our kernel: [heads, keys]."""
    backend = ReferenceBackend("cpu", "float64")
    store = backend.new_kv_store(spec(kind), 16, BLOCK)
    positions = torch.tensor(kept_positions(last))
    base = max(SINKS, last - WINDOW + 1) // BLOCK
    blocks = torch.where(positions < SINKS, 0, positions // BLOCK - base + 1)
    sizes = {"layer": 0, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM}
    slopes = alibi_slopes(HEADS) if kind == "alibi" else None
    values = torch.eye(len(positions), DIM, dtype=torch.float64)[:, None].expand(-1, KV_HEADS, -1).flatten(1)
    # One step a token, as in a stream; only the last one's query matters.
    for row, position in enumerate(positions.tolist()):
        inputs = DecoderInput(
            ids=torch.zeros(1, dtype=torch.int64),
            positions=torch.tensor([position]),
            slots=blocks[row : row + 1] * BLOCK + position % BLOCK,
            query_start=torch.tensor([0, 1], dtype=torch.int32),
            block_tables=torch.arange(8, dtype=torch.int32).unsqueeze(0),
            sink_blocks=torch.tensor([1], dtype=torch.int32),
            recent_base=torch.tensor([base]),
            sinks=torch.tensor([SINKS], dtype=torch.int32),
            windows=torch.tensor([WINDOW]),
            logit_rows=torch.tensor([0]),
        )
        step = Step(inputs, store, backend.device, backend.activations)
        rows = (q.flatten().expand(ROWS, -1), keys[row].flatten().expand(ROWS, -1), values[row].expand(ROWS, -1))
        turned = step.rotate_and_store(*rows, rope=ROPES[kind], **sizes)  # rows beyond the first are padding
    weights = step.attend(
        turned, **sizes, scale=DIM**-0.5, window=None, softcap=None, alibi_slopes=slopes, sink_logits=None
    )[0].view(HEADS, DIM)[:, : len(positions)]
    return weights.log()


def in_cache_scores(kind: str, q: Tensor, keys: Tensor) -> Tensor:
    """The definition: keys rotated at 0, 1, 2, …, the query at the last of these: [heads, keys]."""
    count = keys.shape[0]
    places = torch.arange(count, dtype=torch.float64)
    rope = ROPES[kind]
    if rope is not None:
        keys = torch.stack([turn(keys[place], rope, float(place)) for place in range(count)])
        q = turn(q, rope, float(count - 1))
    scores = torch.einsum("hd,khd->hk", q, keys.repeat_interleave(HEADS // KV_HEADS, dim=1)) / math.sqrt(DIM)
    if kind == "alibi":
        scores = scores - alibi_slopes(HEADS)[:, None] * (count - 1 - places)
    return scores


def turn(x: Tensor, rope: RopeSpec, position: float) -> Tensor:
    """Rotation by the definition: each pair as a complex number times exp(i * angle). x: [heads, head_dim]."""
    factor = torch.polar(torch.ones(rope.dim // 2, dtype=torch.float64), position * inverse_frequencies(rope))
    first, second = (
        (x[:, : rope.dim // 2], x[:, rope.dim // 2 : rope.dim])
        if rope.layout == "halves"
        else (x[:, 0 : rope.dim : 2], x[:, 1 : rope.dim : 2])
    )
    turned = torch.complex(first, second) * factor
    parts = (turned.real, turned.imag)
    pairs = torch.cat(parts, dim=1) if rope.layout == "halves" else torch.stack(parts, dim=-1).flatten(1)
    return torch.cat((pairs, x[:, rope.dim :]), dim=1)


@pytest.mark.parametrize("kind", list(ROPES))
@pytest.mark.parametrize(
    ("last", "tolerance"),
    [(2, 1e-10), (9, 1e-10), (16, 1e-10), (1_003, 1e-10), (100_000, 1e-10), (1_234_567, 1e-8), (10_000_000, 1e-8)],
)
def test_scores_equal_the_in_cache_formulation(kind, last, tolerance):
    generator = torch.Generator().manual_seed(last)
    count = len(kept_positions(last))
    q = torch.randn(HEADS, DIM, dtype=torch.float64, generator=generator)
    keys = torch.randn(count, KV_HEADS, DIM, dtype=torch.float64, generator=generator)
    ours = paged_scores(kind, q, keys, last)
    expected = in_cache_scores(kind, q, keys).log_softmax(dim=-1)
    assert float((ours - expected).abs().max()) < tolerance


def test_without_the_virtual_position_the_scores_differ():
    """The test above can fail: at true positions alone the sinks' scores are others."""
    generator = torch.Generator().manual_seed(0)
    last = 1_003
    q = torch.randn(HEADS, DIM, dtype=torch.float64, generator=generator)
    keys = torch.randn(SINKS + WINDOW, KV_HEADS, DIM, dtype=torch.float64, generator=generator)
    rope = ROPES["halves"]
    true = torch.stack([turn(key, rope, float(p)) for key, p in zip(keys, kept_positions(last), strict=True)])
    scores = torch.einsum("hd,khd->hk", turn(q, rope, float(last)), true.repeat_interleave(2, dim=1)) / DIM**0.5
    assert float((scores - in_cache_scores("halves", q, keys)).abs().max()) > 0.1


LAYER_WINDOWS = (None, 7, None)  # the second layer was trained with a smaller window than the stream's


def toy(backend: ReferenceBackend, heads: dict | None = None) -> Decoder:
    """Three random layers in float64, one with a trained window of its own."""
    norm = NormSpec()
    layers = tuple(
        LayerSpec(
            AttentionSpec(4, 2, 6, window=window, **(heads or {"rope": RopeSpec(dim=6, base=100.0)})),
            MlpSpec(21, gated=True),
            pre_attention=norm,
            pre_mlp=norm,
        )
        for window in LAYER_WINDOWS
    )
    decoder = Decoder(DecoderSpec("toy", 31, 24, 1 << 20, layers, final_norm=norm), backend)
    generator = torch.Generator().manual_seed(1)
    for parameter in decoder.parameters():
        values = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        decoder.fill(parameter.name, 1 + 0.3 * values if len(parameter.shape) == 1 else values * 1.5 / 24**0.5)
    return decoder


def replayed(decoder: Decoder, backend: ReferenceBackend, ids: list[int], count: int) -> Tensor:
    """Logits of the last token after a replay of the sinks and the last `count` tokens, at true positions."""
    paged = Paged(decoder, backend)
    stream = Stream(sinks=SINKS, window=WINDOW)
    paged.step([(stream, ids[:SINKS])])
    stream.length = len(ids) - count
    for start in range(len(ids) - count, len(ids), 9):
        logits = paged.step([(stream, ids[start : start + 9])])[0]
    return logits[-1]


@pytest.mark.parametrize("heads", [{"rope": RopeSpec(dim=6, base=100.0)}, {"alibi": True}], ids=["rope", "alibi"])
def test_a_replay_of_the_stated_length_is_exact_and_a_shorter_one_is_not(heads):
    backend = ReferenceBackend("cpu", "float64")
    decoder = toy(backend, heads)
    ids = torch.randint(0, 31, (120,), generator=torch.Generator().manual_seed(2)).tolist()
    paged, stream = Paged(decoder, backend), Stream(sinks=SINKS, window=WINDOW)
    for start in range(0, len(ids), 5):
        logits = paged.step([(stream, ids[start : start + 5])])[0][-1]
    needed = 1 + sum(min(window or WINDOW, WINDOW) - 1 for window in LAYER_WINDOWS)
    exact = (replayed(decoder, backend, ids, needed) - logits).abs().max()
    shorter = (replayed(decoder, backend, ids, needed - 1) - logits).abs().max()
    assert exact < 1e-13
    assert shorter > 1e-9


def test_sinks_stay_out_of_a_layer_with_a_smaller_trained_window():
    """Stated in DecoderInput: the layer keeps its trained mask. A stream's own window must be the smaller to count."""
    backend = ReferenceBackend("cpu", "float64")
    decoder = toy(backend)
    narrow = [layer for layer in decoder.spec.layers if layer.attention.window is not None]
    single = Decoder(DecoderSpec("toy", 31, 24, 1 << 20, (narrow[0],), final_norm=NormSpec()), backend)
    values = {parameter.name: parameter for parameter in decoder.parameters()}
    generator = torch.Generator().manual_seed(4)
    for parameter in single.parameters():
        assert parameter.name in values
        single.fill(parameter.name, torch.randn(parameter.shape, dtype=torch.float64, generator=generator) * 0.4)
    ids = list(range(30))
    plain = Paged(single, backend).step([(Stream(), ids)])[0]
    retained = Paged(single, backend).step([(Stream(sinks=SINKS, window=WINDOW), ids)])[0]
    assert torch.equal(plain, retained)


def test_keys_that_are_not_kept_are_not_seen():
    """In a replay the first queries' windows reach back before the first kept block, and find nothing there."""
    backend = ReferenceBackend("cpu", "float64")
    decoder = toy(backend)
    results = []
    for rubbish in (1.0, -1e3):
        paged, stream = Paged(decoder, backend), Stream(sinks=SINKS, window=WINDOW)
        for part in (*paged.store.keys, *paged.store.values):
            part.fill_(rubbish)
        paged.step([(stream, [1, 2, 3, 4])])
        stream.length = 40  # at a block's first place, as every replay begins
        results.append(paged.step([(stream, [5, 6, 7])])[0])
    assert torch.equal(*results)


def test_memory_is_constant():
    backend = ReferenceBackend("cpu", "float64")
    paged, stream = Paged(toy(backend), backend, block_size=BLOCK), Stream(sinks=SINKS, window=WINDOW)
    most = 0
    for token in range(200):
        paged.step([(stream, [token % 31])], all_rows=False)
        most = max(most, len(stream.blocks))
    assert most <= math.ceil((SINKS + WINDOW) / BLOCK) + 2
