"""Counted randomness: a number as a function of (seed, choice, index, purpose), and of nothing else.

Knows integers. The same bits as in `decoder/kernels/cpu/sample_random.h`; a test holds both to the published
vectors. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), Philox4x32 with ten rounds.
"""

DRAW = 0  # purpose: which token
XTC = 1  # purpose: whether XTC cuts at this token

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four random 32-bit words of a 128-bit counter under a 64-bit key, all given as 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second & _MASK, (first >> 32) ^ c3 ^ k1, first & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, index: int, purpose: int) -> float:
    """A number in [0, 1) with 53 random bits, for the `index`-th token of a choice."""
    low, high, _, _ = philox(
        (index & _MASK, index >> 32 & _MASK, choice & _MASK, purpose), (seed & _MASK, seed >> 32 & _MASK)
    )
    return ((high << 32 | low) >> 11) * 2.0**-53
