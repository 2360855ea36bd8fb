"""Stop strings in text of any chunking: nothing of a stop is ever shown, nothing else is ever lost."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.text.stops import StopScanner


def run(pieces, stops, include=False):
    """(shown pieces, matched stop)."""
    scanner, shown = StopScanner(tuple(stops), include), []
    for piece in pieces:
        safe, matched = scanner.push(piece)
        shown.append(safe)
        if matched is not None:
            return shown, matched
    return [*shown, scanner.finish()], None


def plain(text, stops, include=False):
    """The same of the whole text, character by character: the first end wins, of two ends the longer stop."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def test_the_alphabet():
    pieces = list("DEFGHIJKLMN")
    assert run(pieces, ["DEFGHIJ"]) == ([""] * 7, "DEFGHIJ")
    shown, matched = run([" AB", "CDE", "FGHI", "JKL"], ["DEFGHIJ"])
    assert ("".join(shown), matched) == (" ABC", "DEFGHIJ")


def test_a_stop_that_never_completes_is_flushed():
    shown, matched = run(["THE ", "TRE\nAAAA"], ["TRE\nAAAAAAAA"])
    assert ("".join(shown), matched) == ("THE TRE\nAAAA", None)
    assert shown[-1] == "TRE\nAAAA"


def test_a_false_start_is_let_go_as_soon_as_it_is_one():
    scanner = StopScanner(("aab",))
    assert [scanner.push(char)[0] for char in "aaac"] == ["", "", "a", "aac"]


@pytest.mark.parametrize(
    ("stops", "text", "shown", "matched"),
    [
        (["abc", "b"], "xabc", "xa", "b"),  # what ends first
        (["abc", "bc"], "xabc", "x", "abc"),  # of two that end together the longer
        (["a", "ab"], "ab", "", "a"),
        (["한국"], "대한국민", "대", "한국"),
        (["🫠"], "a🫠b", "a", "🫠"),
        (["\n\n"], "a\n\nb", "a", "\n\n"),
    ],
)
def test_which_stop_wins(stops, text, shown, matched):
    for size in range(1, len(text) + 1):
        pieces = [text[place : place + size] for place in range(0, len(text), size)]
        got, which = run(pieces, stops)
        assert ("".join(got), which) == (shown, matched)


def test_included_stops_are_shown_and_nothing_after_them():
    shown, matched = run(["ab", "cdef"], ["bcd"], include=True)
    assert ("".join(shown), matched) == ("abcd", "bcd")


LETTERS = st.text(alphabet="ab\n", max_size=12)


@settings(max_examples=500, deadline=None)
@given(
    st.text(alphabet="ab\n", max_size=60),
    st.lists(st.text(alphabet="ab\n", min_size=1, max_size=6), min_size=1, max_size=4, unique=True),
    st.lists(st.integers(1, 5), max_size=60),
    st.booleans(),
)
@example("aabaab", ["aabaac"], [1], False)
def test_any_text_in_any_pieces_equals_the_whole(text, stops, sizes, include):
    pieces, place = [], 0
    for size in [*sizes, *[3] * len(text)]:
        pieces.append(text[place : place + size])
        place += size
    shown, matched = run(pieces, stops, include)
    assert ("".join(shown), matched) == plain(text, stops, include)
    if not include:
        for so_far in ("".join(shown[: n + 1]) for n in range(len(shown))):
            assert text.startswith(so_far)
            assert not any(stop in so_far for stop in stops)
