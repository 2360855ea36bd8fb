"""Arithmetic of retention against the definition, by counting."""

import itertools
import math

import pytest

from model.engine.retention import (
    first_loss,
    first_needed_block,
    max_blocks,
    num_evicted,
    num_sink_blocks,
    replay_reach,
    segment_start,
    sinks_of,
)
from model.protocol import Retention

CASES = [Retention("sinks", s, w) for s, w in ((0, 4), (1, 4), (3, 16), (4, 17), (5, 13))] + [Retention("window", 4, 9)]


def seen(position, retention):
    """By the definition: query p sees key j when j <= p and (j < sinks or j > p - window)."""
    sinks = sinks_of(retention)
    return {j for j in range(position + 1) if j < sinks or j > position - retention.window}


@pytest.mark.parametrize("retention", CASES)
@pytest.mark.parametrize("size", [1, 4, 16])
def test_what_is_freed_is_what_nobody_sees(retention, size):
    for position in range(80):
        sink_blocks = num_sink_blocks(retention, size)
        first = first_needed_block(position, retention.window, size)
        later = set().union(*(seen(p, retention) for p in range(position, position + 3)))
        needed = {j // size for j in later if j >= sinks_of(retention)}
        assert all(block >= min(first, position // size) for block in needed)
        assert all(j // size < sink_blocks or j // size >= first for j in later)
        assert num_evicted(position, retention) == position + 1 - len(seen(position, retention))


def seen_in_layer(position, own, retention):
    """A layer whose own window is smaller keeps its trained mask; `own` 0 is none, `retention` None too."""
    if retention is not None and (not own or retention.window < own):
        return seen(position, retention)
    return {j for j in range(position + 1) if not own or j > position - own}


@pytest.mark.parametrize("retention", CASES)
@pytest.mark.parametrize("layers", [(0,), (0, 6), (10, 0), (14, 16), (18,), (3, 40)])
def test_the_first_loss_is_where_a_layer_sees_other_keys_than_without_retention(retention, layers):
    differ = [any(seen_in_layer(p, own, retention) != seen_in_layer(p, own, None) for own in layers) for p in range(80)]
    first = first_loss(retention, layers)
    assert not any(differ[:first])
    if any(differ):
        assert differ[first], "not a position too early"


@pytest.mark.parametrize("retention", CASES)
@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 5, 16, 40])
def test_the_bound_on_blocks_holds_at_every_position(retention, size, chunk):
    most = (
        math.ceil((sinks_of(retention) + retention.window) / size) + 2 + (math.ceil(chunk / size) if chunk > 1 else 0)
    )
    assert max_blocks(retention, size, chunk) == most
    for start in range(150):
        visible = set().union(*(seen(p, retention) for p in range(start, start + chunk)))
        held = {j // size for j in visible} | set(range(num_sink_blocks(retention, size)))
        assert len(held) <= most


@pytest.mark.parametrize("retention", CASES)
@pytest.mark.parametrize("layers", [(0,), (0, 0, 0), (0, 6, 0), (5, 3), (30, 0)])
def test_the_reach_is_how_far_a_key_depends_back(retention, layers):
    """Follow the dependencies of the last token's keys down through the layers."""
    end = 400
    needed = {end - 1}
    for own in reversed(layers):
        window = min(own or retention.window, retention.window)
        needed = {j for p in needed for j in range(max(0, p - window + 1), p + 1)}
    assert end - min(needed) == replay_reach(retention, layers)


@pytest.mark.parametrize(("sinks", "window"), [(4, 1020), (0, 7), (3, 20), (1, 2)])
def test_segments_of_restart(sinks, window):
    """A table of sinks + window positions: whenever it is full, sinks and the newest half window begin anew."""
    limit, half = sinks + window, max(1, window // 2)
    begin = sinks
    held = list(range(limit))
    assert {segment_start(index, sinks, window) for index in held} == {sinks}
    for index in range(limit, limit + 5 * window):
        if len(held) == limit:
            begin = index - half
            held = list(range(sinks)) + list(range(begin, index))
        held.append(index)
        assert segment_start(index, sinks, window) == begin
        assert len(held) <= limit


def test_nothing_falls_out_without_a_sliding_policy():
    for policy, position in itertools.product(("none", "restart"), (0, 19)):
        retention = Retention(policy, 4, 16)
        assert num_evicted(position, retention) == 0
        assert num_sink_blocks(retention, 4) == 0
    assert num_evicted(5000, Retention("none")) == 0
    assert num_evicted(20, Retention("restart", 4, 16)) == segment_start(20, 4, 16) - 4
