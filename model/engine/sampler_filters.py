"""The sampling controls, one small function each: scores in, scores out, float64 [vocabulary], -inf is "cut".

Knows one row's scores and numbers; no requests, no randomness beyond a number it is given. This is the oracle
for `decoder/kernels/cpu/sample*.cpp` and serves where that cannot be compiled. No filter cuts the last token.
Ties are in order of the ids: of two equal scores the smaller id counts as the likelier.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]
Ids = NDArray[np.int32]

CUT = -np.inf
MAX_DRY_PENALTY = 1e30  # float32 must hold it
SMALLEST_LOG = -87.0  # a token e**87 times less likely than the best one counts as impossible: float32 holds no less
MIN_TEMPERATURE = 1e-6  # smaller ones count as this: logits divided by it are still numbers
MIN_REPETITION = 1e-6  # likewise


def softmax(scores: Scores) -> Scores:
    """Probabilities; a cut token has 0."""
    weights = weigh(scores)
    return np.asarray(weights / weights.sum())


def weigh(scores: Scores) -> Scores:
    """Weights relative to the best token's 1."""
    away = scores - scores.max()
    return np.where(away > SMALLEST_LOG, np.exp(away), 0.0)


def best_first(scores: Scores) -> NDArray[np.int64]:
    """Ids in order of falling score, ties by id."""
    return np.argsort(-scores, kind="stable")


def bias(scores: Scores, entries: Sequence[tuple[int, float]]) -> Scores:
    """Add to single logits (the `logit_bias` of OpenAI's API)."""
    scores = scores.copy()
    for token, value in entries:
        scores[token] += value
    return scores


def allow_only(scores: Scores, allowed: Sequence[int]) -> Scores:
    """Cut every token but these (vLLM's `allowed_token_ids`)."""
    kept = np.full_like(scores, CUT)
    index = np.asarray(allowed, dtype=np.int64)
    kept[index] = scores[index]
    return kept


def ban(scores: Scores, banned: Sequence[int]) -> Scores:
    """Cut these tokens (`min_tokens`: ends of sequence and stop ids before that many tokens)."""
    scores = scores.copy()
    scores[np.asarray(banned, dtype=np.int64)] = CUT
    return scores


def ban_words(scores: Scores, words: Sequence[Sequence[int]], history: Ids) -> Scores:
    """Cut the last token of each word whose other tokens end the stream (transformers' `bad_words_ids`)."""
    scores = scores.copy()
    for word in words:
        begin = len(word) - 1
        if len(history) >= begin and np.array_equal(history[len(history) - begin :], word[:begin]):
            scores[word[-1]] = CUT
    return scores


def repetition(scores: Scores, ids: Ids, penalty: float) -> Scores:
    """Divide positive and multiply negative logits of tokens of prompt or output (Keskar et al., "CTRL", 2019, 4.1)."""
    scores = scores.copy()
    penalty = max(penalty, MIN_REPETITION)
    seen = scores[ids]
    scores[ids] = np.where(seen > 0, seen / penalty, seen * penalty)
    return scores


def presence_frequency(scores: Scores, ids: Ids, counts: NDArray[Any], presence: float, frequency: float) -> Scores:
    """Subtract `presence` once and `frequency` for each time a token occurred in the output (OpenAI's API)."""
    scores = scores.copy()
    scores[ids] -= presence * (counts > 0) + frequency * counts
    return scores


def dry(
    scores: Scores, history: Ids, breakers: Sequence[int], multiplier: float, base: float, allowed_length: int
) -> Scores:
    """Penalise a token that would go on with a phrase of the stream that its end repeats ("Don't Repeat Yourself",
    p-e-w, text-generation-webui pull request 5677): multiplier * base ** (length - allowed length), where length is
    that of the longest such phrase, which no breaker interrupts."""
    scores = scores.copy()
    for token, length in repeated_phrases(history, breakers).items():
        if length >= allowed_length:
            exponent = (length - allowed_length) * np.log(base) + np.log(multiplier)
            scores[token] -= np.exp(min(exponent, np.log(MAX_DRY_PENALTY)))
    return scores


def repeated_phrases(history: Ids, breakers: Sequence[int]) -> dict[int, int]:
    """For each token that has followed the stream's last tokens before: how many of them were the same there."""
    if len(history) < 2 or history[-1] in breakers:
        return {}
    followers = 1 + np.flatnonzero(history[:-1] == history[-1])  # places of tokens that followed the last one
    reached = np.zeros(len(history), dtype=np.int64)
    length = 1
    while len(followers):
        reached[followers] = length
        length += 1
        followers = followers[followers >= length]
        if length > len(history) or history[-length] in breakers:
            break
        followers = followers[history[followers - length] == history[-length]]
    places = np.flatnonzero(reached)
    places = places[np.argsort(reached[places], kind="stable")]  # so that the longest comes last, and stays
    return {int(history[place]): int(reached[place]) for place in places if history[place] not in breakers}


def temperature(scores: Scores, value: float) -> Scores:
    """Divide by the temperature (Ackley, Hinton and Sejnowski, "A learning algorithm for Boltzmann machines", 1985)."""
    return scores / max(value, MIN_TEMPERATURE)


def dynamic_temperature(scores: Scores, value: float, reach: float, exponent: float) -> float:
    """Temperature between value - reach and value + reach, by the share of the highest possible entropy
    (kalomaze's "dynamic temperature", as in llama.cpp)."""
    low, high = max(0.0, value - reach), value + reach
    probabilities = softmax(scores)
    alive = int(np.count_nonzero(scores > CUT))
    if alive < 2:
        return max(value, MIN_TEMPERATURE)
    share = entropy(probabilities) / np.log(alive)
    return max(low + (high - low) * float(share**exponent), MIN_TEMPERATURE)


def entropy(probabilities: Scores) -> float:
    """In nats."""
    alive = probabilities[probabilities > 0]
    return float(max(0.0, -(alive * np.log(alive)).sum()))


def top_k(scores: Scores, count: int) -> Scores:
    """Keep the `count` most likely (Fan et al., "Hierarchical neural story generation", 2018)."""
    return _keep(scores, best_first(scores)[:count])


def top_p(scores: Scores, mass: float) -> Scores:
    """Keep the most likely that together reach `mass`, the crossing one included (Holtzman et al., "The curious
    case of neural text degeneration", 2020)."""
    order = best_first(scores)
    return _keep(scores, order[: _crossing(softmax(scores)[order], mass)])


def min_p(scores: Scores, share: float) -> Scores:
    """Keep tokens at least `share` times as likely as the best one (Nguyen et al., "Turning up the heat", 2024)."""
    return np.where(scores >= scores.max() + np.log(max(share, 1e-300)), scores, CUT)


def typical_p(scores: Scores, mass: float) -> Scores:
    """Keep the tokens whose surprise is nearest to the mean one until they reach `mass` (Meister et al.,
    "Locally typical sampling", 2023)."""
    probabilities = softmax(scores)
    mean = entropy(probabilities)
    surprise = np.full_like(scores, np.inf)
    alive = probabilities > 0
    surprise[alive] = np.abs(-np.log(probabilities[alive]) - mean)
    order = np.argsort(surprise, kind="stable")
    return _keep(scores, order[: _crossing(probabilities[order], mass)])


def top_n_sigma(scores: Scores, penalised: Scores, model: Scores, count: float) -> Scores:
    """Keep tokens whose logit is within `count` standard deviations of the best one (Tang et al., "Top-nsigma: not
    all logits are you need", 2024). Logits before temperature, so it does not matter; the deviation is the model's
    own, which no bias or penalty can blow up."""
    kept = np.where(penalised >= penalised.max() - count * model[model > CUT].std(), scores, CUT)
    return kept if kept.max() > CUT else _keep(scores, best_first(scores)[:1])


def xtc(scores: Scores, threshold: float) -> Scores:
    """Cut all tokens of at least `threshold` but the least likely of them ("exclude top choices", p-e-w,
    text-generation-webui pull request 6335). The caller draws whether it happens."""
    order = best_first(scores)
    falling = softmax(scores)[order]
    likely = order[(falling >= threshold) & (falling > 0)]
    if len(likely) < 2:
        return scores
    return ban(scores, likely[:-1].tolist())


def _crossing(falling: Scores, mass: float) -> int:
    """How many of the probabilities, taken in order, first reach `mass`."""
    return int(np.searchsorted(np.cumsum(falling), mass)) + 1


def _keep(scores: Scores, ids: NDArray[np.int64]) -> Scores:
    kept = np.full_like(scores, CUT)
    kept[ids] = scores[ids]
    return kept
