"""Seeded strings of many scripts, with emoji, combining marks, controls and all kinds of spaces."""

import random

RANGES = {
    "latin": [(0x41, 0x5A), (0x61, 0x7A), (0xC0, 0x17F)],
    "greek": [(0x391, 0x3A1), (0x3B1, 0x3C9)],
    "cyrillic": [(0x410, 0x44F)],
    "hebrew": [(0x5D0, 0x5EA)],
    "arabic": [(0x621, 0x64A), (0x64B, 0x652), (0x660, 0x669)],
    "devanagari": [(0x905, 0x939), (0x93E, 0x94D), (0x966, 0x96F)],
    "thai": [(0xE01, 0xE3A), (0xE40, 0xE4E)],
    "hangul": [(0xAC00, 0xD7A3)],
    "jamo": [(0x1100, 0x1112), (0x1161, 0x1175), (0x11A8, 0x11C2)],
    "kana": [(0x3041, 0x3096), (0x30A1, 0x30FA)],
    "han": [(0x4E00, 0x9FA5), (0x20000, 0x20050)],
    "digits": [(0x30, 0x39)],
    "numbers": [(0xB2, 0xB3), (0x2160, 0x216F), (0x2460, 0x2473), (0xFF10, 0xFF19)],
    "punctuation": [(0x21, 0x2F), (0x3A, 0x40), (0x5B, 0x60), (0x7B, 0x7E), (0x2010, 0x2027), (0x3001, 0x3003)],
    "symbols": [(0x2190, 0x21FF), (0x2200, 0x22FF), (0x20A0, 0x20BF), (0xA1, 0xBF)],
    "emoji": [(0x1F600, 0x1F64F), (0x1F300, 0x1F5FF), (0x1F1E6, 0x1F1FF)],
    "combining": [(0x300, 0x33F), (0x20D0, 0x20DC)],
    "controls": [(0x00, 0x1F), (0x7F, 0x9F), (0x200B, 0x200F), (0xFE00, 0xFE0F), (0xE000, 0xE010)],
    "spaces": [(0x20, 0x20), (0x09, 0x0D), (0xA0, 0xA0), (0x2000, 0x200A), (0x2028, 0x2029), (0x3000, 0x3000)],
}
PIECES = [
    "I'm", "WE'LL", "don't", "’s", "3.14", "1,000,000", "2024-11-29", "http://a.b/c?d=e&f", "  ", "   ", "\n\n", "\r\n",
    " \n ", "\t\t", "👩‍👩‍👧‍👦", "👍🏽", "🇰🇷", "e\u0301", "각", "ㄱㅏ", "…", "def f(x):\n    return x", "<tag/>", "ﬁ",
    "é", "Å", "▁", "▁▁a", "\u00a0", "\ufeff", "\ufffd", "a" * 40, "!?!?!?", "x²+y²", "½", "ÀÉÎ", "STRASSE", "straße",
    "İi", "ʼn", " the", " and", "Hello", " world", "안녕하세요", "こんにちは", "你好，世界", "Привет", "مرحبا", "नमस्ते",
    "สวัสดี",
]  # fmt: skip


def strings(count, seed=0):
    """`count` strings, from empty to about two hundred characters."""
    rng = random.Random(seed)
    return [_string(rng) for _ in range(count)]


def _string(rng):
    parts = []
    for _ in range(rng.choice((0, 1, 1, 2, 3, 5, 8, 13))):
        kind = rng.random()
        if kind < 0.35:
            parts.append(rng.choice(PIECES))
        elif kind < 0.55:
            parts.append(" " * rng.choice((0, 1, 1, 1, 2, 5)) + rng.choice("\n\t ,.:;"))
        else:
            ranges = RANGES[rng.choice(list(RANGES))]
            length = rng.choice((1, 2, 4, 9))
            parts.append("".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(length)))
            parts.append(rng.choice(("", "", " ")))
    return "".join(parts)
