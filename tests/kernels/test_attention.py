"""Paged attention: long contexts in splits, every rule of the scores, hostile caches, against the reference."""

import pytest
import torch

from model.decoder.inputs import NO_WINDOW, DecoderInput
from tests.kernels.probe import Probe, plain_spec, raw

RULES = {
    "plain": {},
    "window": {"window": 100},
    "softcap": {"softcap": 4.0},
    "alibi": {"alibi_slopes": True},
    "sink_logits": {"sink_logits": True},
    "all": {"window": 300, "softcap": 6.0, "alibi_slopes": True, "sink_logits": True},
}


def attention(backend, heads, kv_heads, head_dim, rule, table):
    """A probe whose queries, keys and values are columns of its table; no rotation."""
    torch.manual_seed(heads)
    widths = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    packed = backend.pack(raw(table), lookup=True)
    rule = {"window": None, "softcap": None, "alibi_slopes": None, "sink_logits": None} | RULES[rule]
    if rule["alibi_slopes"]:
        rule["alibi_slopes"] = backend.place(torch.rand(heads) / 50)
    if rule["sink_logits"]:
        rule["sink_logits"] = backend.place(torch.randn(heads))
    shape = {"layer": 0, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}

    def build(ops):
        q, k, v = ops.split(ops.embed(packed, 1.0), widths)
        q = ops.rotate_and_store(q, k, v, **shape, rope=None)
        return ops.scale(ops.select_rows(ops.attend(q, **shape, scale=head_dim**-0.5, **rule)), 1.0)

    return Probe(build, plain_spec(heads, kv_heads, head_dim))


def ragged(lengths, news, block_size, sinks=0, window=NO_WINDOW, seed=0):
    """Steps that bring sequences to `lengths`, the last `news` tokens of each in one step; scrambled blocks."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randperm(sum(-(-length // block_size) for length in lengths) + 3, generator=generator).tolist()
    tables = [[blocks.pop() for _ in range(-(-length // block_size))] for length in lengths]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    for step in (0, 1):
        spans = [(0, n - m) if step == 0 else (n - m, n) for n, m in zip(lengths, news, strict=True)]
        places = [torch.arange(*span) for span in spans]
        slots = [
            torch.tensor([table[p // block_size] * block_size + p % block_size for p in place.tolist()])
            for table, place in zip(tables, places, strict=True)
        ]
        yield DecoderInput(
            ids=torch.cat([place + start for place, start in zip(places, starts[:-1], strict=True)]),
            positions=torch.cat(places),
            slots=torch.cat(slots).long(),
            query_start=torch.tensor([0, *[len(place) for place in places]]).cumsum(0).int(),
            block_tables=torch.tensor([table + [0] * (max(map(len, tables)) - len(table)) for table in tables]).int(),
            sink_blocks=torch.full((len(lengths),), -(-sinks // block_size)).int(),
            recent_base=torch.full((len(lengths),), -(-sinks // block_size)),
            sinks=torch.full((len(lengths),), sinks).int(),
            windows=torch.full((len(lengths),), window),
            logit_rows=torch.arange(sum(len(place) for place in places)),
        )


def results(backend, probe, steps, spoil=True):
    """The last step's rows; the cache starts full of NaN."""
    steps = list(steps)
    block_size = 16
    blocks = 3 + steps[0].block_tables.numel()
    store = backend.new_kv_store(probe.spec, blocks, block_size)
    if spoil:
        for block in range(blocks):
            store.spoil(block)
    return [backend.run(probe, step, store) for step in steps][-1]


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 8), (5, 1, 20), (30, 1, 16)])
def test_rules_shapes_and_ragged_rows(exact, reference, rule, heads, kv_heads, head_dim):
    lengths, news = (540, 34, 2, 290, 16), (20, 33, 1, 1, 3)
    torch.manual_seed(1)
    table = torch.randn(sum(lengths), (heads + 2 * kv_heads) * head_dim)
    for policy in ({}, {"sinks": 20, "window": 150}):
        got = results(
            exact, attention(exact, heads, kv_heads, head_dim, rule, table), ragged(lengths, news, 16, **policy)
        )
        probe = attention(reference, heads, kv_heads, head_dim, rule, table)
        expected = results(reference, probe, ragged(lengths, news, 16, **policy), spoil=False)
        torch.testing.assert_close(got.double(), expected.double(), rtol=1e-4, atol=2e-5)


def replays(sinks, window, block_size, starts, count):
    """Streams whose sink blocks are there and whose replays have just begun, `count` tokens from `starts` on."""
    sink_blocks = -(-sinks // block_size)
    held, more = sink_blocks * block_size, -(-count // block_size)
    width = sink_blocks + more
    tables = torch.arange(len(starts) * width, dtype=torch.int32).flip(0).view(len(starts), width)
    for first, span in ((torch.zeros(len(starts), dtype=torch.int64), held), (torch.tensor(starts), count)):
        if not span:
            continue
        positions = first[:, None] + torch.arange(span)
        base = torch.maximum(first // block_size, torch.tensor(sink_blocks))
        entries = torch.where(
            positions < held, positions // block_size, positions // block_size - base[:, None] + sink_blocks
        )
        slots = tables.gather(1, entries).long() * block_size + positions % block_size
        yield DecoderInput(
            ids=positions.flatten(),
            positions=positions.flatten(),
            slots=slots.flatten(),
            query_start=torch.arange(len(starts) + 1, dtype=torch.int32) * span,
            block_tables=tables,
            sink_blocks=torch.full((len(starts),), sink_blocks, dtype=torch.int32),
            recent_base=base,
            sinks=torch.full((len(starts),), sinks, dtype=torch.int32),
            windows=torch.full((len(starts),), window),
            logit_rows=torch.arange(len(starts) * span),
        )


@pytest.mark.parametrize("rule", ["plain", "window", "all"])
@pytest.mark.parametrize(("sinks", "window"), [(0, 600), (4, 600), (20, 150), (4, 1500)])
@pytest.mark.parametrize("count", [1, 40])
def test_the_beginning_of_a_replay_sees_nothing_that_is_not_there(exact, reference, rule, sinks, window, count):
    """Its windows reach back before the first block of the table, by more blocks than the table has entries."""
    torch.manual_seed(7)
    starts, table = (1600, 48, 320), torch.randn(1700, 15 * 64)

    def steps():
        return replays(sinks, window, 16, starts, count)

    got = results(exact, attention(exact, 9, 3, 64, rule, table), steps())
    expected = results(reference, attention(reference, 9, 3, 64, rule, table), steps(), spoil=False)
    assert got.isfinite().all()
    torch.testing.assert_close(got.double(), expected.double(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("policy", [{}, {"sinks": 4, "window": 1000}])
def test_splits_over_threads_change_no_bit(served, policy):
    """A single long stream is cut over the threads; among others it is not: the bits are the same."""
    lengths = (1500, 40, 40, 40, 40)
    torch.manual_seed(2)
    table = torch.randn(sum(lengths), 15 * 64)
    probe = attention(served, 9, 3, 64, "plain", table)
    alone = results(served, probe, ragged(lengths[:1], (1,), 16, **policy))
    beside = results(served, probe, ragged(lengths, (1, 5, 5, 5, 5), 16, **policy))
    chunk = results(served, probe, ragged(lengths[:1], (200,), 16, **policy))
    assert torch.equal(alone[0], beside[0])
    assert torch.equal(alone[0], chunk[-1])


@pytest.mark.parametrize("rule", ["plain", "alibi"])
@pytest.mark.parametrize(("sinks", "window"), [(4, 700), (300, 404)])
@pytest.mark.parametrize("news", [1, 300])
def test_before_the_first_eviction_the_bits_are_those_without_retention(served, rule, sinks, window, news):
    """Up to position sinks + window - 1 a query sees all keys, under any policy: its row must not tell which."""
    lengths = (704 + min(news, 40) - 1, 500)  # the first one's last queries see less
    torch.manual_seed(3)
    table = torch.randn(sum(lengths), 15 * 64)
    probe = attention(served, 9, 3, 64, rule, table)
    for these in (lengths, lengths[:1]):  # in company, and cut over the threads
        rows = [news] * len(these)
        plain = results(served, probe, ragged(these, rows, 16))
        kept = results(served, probe, ragged(these, rows, 16, sinks=sinks, window=window))
        seen_by_all = torch.cat([torch.arange(n - news, n) < sinks + window for n in these])
        same = (plain == kept).all(dim=1)
        assert same[seen_by_all].all()
        if news > 1:
            assert not same[~seen_by_all].any()


def test_float16_keys_and_values_cost_little(served, reference):
    torch.manual_seed(3)
    table = torch.randn(600, 15 * 64).to(torch.bfloat16).to(torch.float32)
    got = results(served, attention(served, 9, 3, 64, "plain", table), ragged((600,), (20,), 16))
    probe = attention(reference, 9, 3, 64, "plain", table)
    expected = results(reference, probe, ragged((600,), (20,), 16), spoil=False)
    torch.testing.assert_close(got.double(), expected.double(), rtol=2e-3, atol=1e-3)


def test_a_value_too_large_for_float16_stays_finite(served):
    table = torch.full((3, 24), 1.0)
    table[:, 16:] = 1e6
    got = results(served, attention(served, 1, 1, 8, "plain", table), ragged((3,), (1,), 16))
    assert got.isfinite().all()


def test_a_block_size_that_is_no_multiple_of_eight_is_refused(served):
    with pytest.raises(ValueError, match="multiple of 8"):
        served.new_kv_store(plain_spec(), 4, 12)


def test_copied_blocks_hold_the_same(served):
    torch.manual_seed(4)
    table = torch.randn(20, 24)
    probe = attention(served, 1, 1, 8, "plain", table)
    steps = list(ragged((12,), (1,), 16))
    store = served.new_kv_store(probe.spec, 8, 16)
    served.run(probe, steps[0], store)
    used = int(steps[0].block_tables[0, 0])
    other = (used + 1) % 8
    store.copy_block(used, other)
    first = served.run(probe, steps[1], store)
    moved = type(steps[1])(
        **{
            **vars(steps[1]),
            "block_tables": torch.full((1, 1), other).int(),
            "slots": steps[1].slots % 16 + other * 16,
        }
    )
    assert torch.equal(served.run(probe, moved, store), first)


def test_a_cache_of_another_backend_is_refused(served, reference):
    store = reference.new_kv_store(plain_spec(), 4, 8)
    step = next(ragged((3,), (1,), 16))
    with pytest.raises(TypeError, match="of their own making"):
        served.run(Probe(lambda ops: None), step, store)
