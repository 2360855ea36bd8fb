"""An answer's text parted into thoughts and what is said, while it arrives: `<think>…</think>`.

Knows the two marks only, and only at the start of an answer; text in pieces of any size.
"""

from typing import NamedTuple

OPENING, CLOSING = "<think>", "</think>"


def has_thoughts(chat_template: str | None) -> bool:
    """Whether the model's template knows thoughts at all."""
    return chat_template is not None and CLOSING in chat_template


class Parted(NamedTuple):
    """A piece of an answer: what belongs to the thoughts, and what to the content."""

    reasoning: str
    content: str


class ReasoningSplitter:
    """State of one answer: before its thoughts, in them, or past them. Newlines right behind a mark are dropped."""

    def __init__(self, inside: bool) -> None:
        """`inside`: the prompt has opened the thoughts already."""
        self._state = "inside" if inside else "before"
        self._held = ""
        self._fresh = inside

    def push(self, text: str) -> Parted:
        """Part the next piece; what may be the beginning of a mark is held back."""
        whole, self._held = self._held + text, ""
        if self._state == "before":
            start = whole.lstrip()
            if OPENING.startswith(start[: len(OPENING)]) and len(start) < len(OPENING):
                self._held = whole
                return Parted("", "")
            self._state = "past"
            if start.startswith(OPENING):
                self._state, self._fresh = "inside", True
                whole = start[len(OPENING) :]
        if self._state == "past":
            return Parted("", self._trimmed(whole))
        thought, mark, content = whole.partition(CLOSING)
        if mark:
            shown = self._trimmed(thought)
            self._state, self._fresh = "past", True
            return Parted(shown, self._trimmed(content))
        keep = next((n for n in range(len(CLOSING) - 1, 0, -1) if whole.endswith(CLOSING[:n])), 0)
        self._held = whole[len(whole) - keep :]
        return Parted(self._trimmed(whole[: len(whole) - keep]), "")

    def finish(self) -> Parted:
        """What was held back, at the end."""
        held, self._held = self._held, ""
        return Parted(held, "") if self._state == "inside" else Parted("", held)

    def _trimmed(self, text: str) -> str:
        if self._fresh:
            text = text.lstrip("\n")
            self._fresh = not text
        return text
