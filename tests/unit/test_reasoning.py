"""`<think>` parts told apart from what is said, in text of any chunking."""

import pytest

from app.text.reasoning import ReasoningSplitter, has_thoughts


def part(text, size, inside=False):
    splitter = ReasoningSplitter(inside)
    pieces = [splitter.push(text[place : place + size]) for place in range(0, len(text), size)] + [splitter.finish()]
    return "".join(p.reasoning for p in pieces), "".join(p.content for p in pieces)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>\nWhy?\n</think>\n\nBecause.", False, "Why?\n", "Because."),
        ("Why?</think>Because.", True, "Why?", "Because."),
        ("no thoughts at all", False, "", "no thoughts at all"),
        ("<b>bold</b>", False, "", "<b>bold</b>"),
        ("say <think>late</think>", False, "", "say <think>late</think>"),
        ("<think>never ends </thi", False, "never ends </thi", ""),
        ("<thi", False, "", "<thi"),
        ("  <think>a</think>b</think>c", False, "a", "b</think>c"),
        ("", False, "", ""),
        ("  two spaces", False, "", "  two spaces"),
    ],
)
def test_parts(text, inside, reasoning, content, size):
    assert part(text, size, inside) == (reasoning, content)


def test_only_templates_with_thoughts_have_them():
    assert has_thoughts("{{ '<think>' }}{{ '</think>' }}")
    assert not has_thoughts("{{ messages }}")
    assert not has_thoughts(None)
