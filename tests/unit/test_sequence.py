"""A stream's ids in bounded memory, and where positions stand in the stream."""

import pytest

from model.engine.sequence import Group, Sequence, TokenLog
from model.protocol import Retention, SamplingParams, Submit


def test_a_log_that_keeps_everything():
    log = TokenLog(range(10))
    for token in range(10, 5000):
        log.append(token)
    assert len(log) == log.num_held == 5000
    assert log.get(3, 8).tolist() == [3, 4, 5, 6, 7]


def test_a_log_that_keeps_head_and_tail():
    log = TokenLog(range(3), keep_head=6, keep_tail=20)
    for token in range(3, 1000):
        log.append(token)
        assert log.num_held <= 6 + 40
        tail = range(max(0, len(log) - 20), len(log))
        assert log.get(tail.start, tail.stop).tolist() == list(tail)
        head = range(min(6, len(log)))
        assert log.get(head.start, head.stop).tolist() == list(head)
    with pytest.raises(LookupError, match="dropped"):
        log.get(100, 110)
    with pytest.raises(LookupError, match="dropped"):
        log.get(4, 8)


def test_a_log_that_begins_late():
    log = TokenLog(range(50, 60), keep_head=4, keep_tail=5, base=50, head=range(8))
    assert (len(log), log.available_from) == (60, 50)
    assert log.get(0, 4).tolist() == [0, 1, 2, 3]
    with pytest.raises(LookupError):
        log.get(3, 6)


def test_a_copy_is_independent():
    log = TokenLog(range(5), keep_head=2, keep_tail=3)
    copy = log.copy()
    copy.append(99)
    assert (len(log), len(copy)) == (5, 6)


def sequence(length, sinks, segment_start=None):
    group = Group(Submit("a", 1, tuple(range(length)), SamplingParams(), Retention("restart", sinks, 16)), 0.0)
    one = Sequence(group, 0, TokenLog(range(length)), None, sinks=sinks)
    one.segment_start = sinks if segment_start is None else segment_start
    return one


def test_positions_are_places_in_the_first_segment():
    one = sequence(30, 3)
    assert (one.length, one.remaining) == (30, 30)
    assert one.ids(0, 30).tolist() == list(range(30))


def test_positions_of_a_later_segment_are_the_sinks_and_what_follows():
    one = sequence(30, 3, segment_start=20)
    assert one.length == 13
    assert one.ids(0, 13).tolist() == [0, 1, 2, *range(20, 30)]
    assert one.ids(2, 3).tolist() == [2, 20, 21]
    assert one.ids(5, 2).tolist() == [22, 23]
    assert one.ids(0, 2).tolist() == [0, 1]
    assert [one.place(position) for position in (0, 2, 3, 12)] == [0, 2, 20, 29]
    one.computed = 12
    assert one.remaining == 1


def test_logical_blocks_and_table_entries():
    one = sequence(30, 3)
    one.sink_blocks, one.recent_base = 2, 7
    assert one.next_logical == 0
    one.blocks.extend([11, 12])
    assert one.next_logical == 7
    one.blocks.extend([13, 14])
    assert one.next_logical == 9
    assert [one.entry(logical) for logical in (0, 1, 7, 8)] == [0, 1, 2, 3]


def test_ten_seconds_of_waiting_are_one_level_of_priority():
    def key(arrived, priority):
        return Group(Submit("a", 1, (1,), SamplingParams(), priority=priority), arrived).key

    assert key(100.0, 1) < key(111.0, 0)
    assert key(100.0, 0) < key(109.0, 0)
    assert key(109.0, 0) < key(100.0, 1)
