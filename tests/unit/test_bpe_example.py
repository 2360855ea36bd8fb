"""The worked example of byte-pair encoding: first merges on the counts of low, lower, newest and widest.

An example function of the algorithm (Sennrich et al. 2016, arXiv:1508.07909), and the library that our tokenizers
are built from, which must merge the same pairs.
"""

from collections import Counter
from itertools import pairwise

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

COUNTS = {"low": 5, "lower": 2, "newest": 6, "widest": 3}


def merges(counts: dict[str, int], steps: int) -> list[tuple[str, int]]:
    """The merged pairs in order, each with how often it stood in the corpus when it was merged."""
    words = {tuple(word): count for word, count in counts.items()}
    found = []
    for _ in range(steps):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                pairs[pair] += count
        best = max(pairs, key=lambda pair: (pairs[pair], [-ord(letter) for letter in pair[0][0] + pair[1][0]]))
        found.append(("".join(best), pairs[best]))
        words = {merged(word, best): count for word, count in words.items()}
    return found


def merged(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    parts: list[str] = []
    for part in word:
        if parts and (parts[-1], part) == pair:
            parts[-1] += part
        else:
            parts.append(part)
    return tuple(parts)


def test_the_first_merges():
    assert merges(COUNTS, 4) == [("es", 9), ("est", 9), ("lo", 7), ("low", 7)]


def test_the_library_merges_the_same():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    letters = len(set("".join(COUNTS)))
    trainer = trainers.BpeTrainer(vocab_size=letters + 4, show_progress=False)
    tokenizer.train_from_iterator([" ".join([word] * count) for word, count in COUNTS.items()], trainer)
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    assert [piece for piece, _ in vocabulary[letters:]] == ["es", "est", "lo", "low"]
    assert tokenizer.encode("lowest").tokens == ["low", "est"]
