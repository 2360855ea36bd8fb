"""Stop strings found in text that arrives in pieces of any size.

Knows characters only. The answer does not depend on how the text was cut: the stop that is completed first wins,
and of two completed by the same character the longer one. Aho and Corasick, "Efficient string matching" (1975).
"""

from collections import deque
from functools import lru_cache


class _Automaton:
    """A state is the longest suffix of the text so far that begins some stop; `depth` is its length."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.edges: list[dict[str, int]] = [{}]
        self.depth: list[int] = [0]
        self.ends: list[str | None] = [None]  # the longest stop that ends in this state
        self.back: list[int] = [0]  # the state of the longest shorter suffix
        for stop in stops:
            self._add(stop)
        self._link()

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            following = self.edges[state].get(char)
            if following is None:
                following = len(self.edges)
                self.edges[state][char] = following
                self.edges.append({})
                self.depth.append(self.depth[state] + 1)
                self.ends.append(None)
                self.back.append(0)
            state = following
        self.ends[state] = stop

    def _link(self) -> None:
        waiting = deque(self.edges[0].values())
        while waiting:
            state = waiting.popleft()
            for char, following in self.edges[state].items():
                self.back[following] = self.step(self.back[state], char)
                if self.ends[following] is None:
                    self.ends[following] = self.ends[self.back[following]]
                waiting.append(following)

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        while state and char not in self.edges[state]:
            state = self.back[state]
        return self.edges[state].get(char, 0)


_automaton = lru_cache(maxsize=64)(_Automaton)


class StopScanner:
    """Holds back what may be the beginning of a stop, until it is one or is not."""

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        """`stops` must not hold ""; `include` shows the stop itself before the end."""
        self._automaton = _automaton(stops)
        self._include = include
        self._state = 0
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that is safe to show, and the stop that ended it (then what follows it is dropped)."""
        automaton, state = self._automaton, self._state
        for place, char in enumerate(text):
            state = automaton.step(state, char)
            matched = automaton.ends[state]
            if matched is not None:
                shown = self._held + text[: place + 1]
                self._held, self._state = "", 0
                return (shown if self._include else shown[: len(shown) - len(matched)]), matched
        self._state = state
        whole = self._held + text
        safe = len(whole) - automaton.depth[state]
        self._held = whole[safe:]
        return whole[:safe], None

    def finish(self) -> str:
        """What was held back, at the end of a text that never completed it."""
        held, self._held, self._state = self._held, "", 0
        return held
