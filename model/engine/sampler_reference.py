"""One row's way from logits to a token, control after control in the one documented order, in plain numpy.

Knows the order; each control itself is in `sampler_filters`. The oracle for the compiled sampler, and what serves
where there is none. Order: bias, allowed ids, bad words, bans; repetition, presence and frequency, DRY;
temperature; top_k, top_p, min_p, typical_p, top_n_sigma, XTC; the draw.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.engine import sampler_filters as filters
from model.engine.sampler_filters import CUT, Scores
from model.engine.sampler_random import DRAW, XTC, uniform
from model.engine.sampler_state import SamplerState
from model.protocol import MAX_DRY_RANGE, SamplingParams, TokenLogprob

NOT_FINITE_ERROR = "the model's logits hold NaN or infinity, so no token can be drawn; the weights may be damaged"
ALL_CUT_ERROR = (
    "no token is left to draw: logit_bias, allowed_token_ids, bad_words and min_tokens together rule all of them out"
)


class NoToken(ValueError):
    """No token can be drawn from this row; the sentence says why."""


@dataclass(frozen=True)
class SampleRow:
    """One row to sample. `index` is the place of the new token in the choice's output; `banned` are ids that must
    not come yet (ends of sequence and stop ids while index < min_tokens)."""

    params: SamplingParams
    state: SamplerState
    choice: int
    index: int
    banned: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sampled:
    """A token, with its log-probability where asked for; or an error in a sentence, and then token -1."""

    token: int
    logprob: TokenLogprob | None = None
    error: str = ""


def sample_one(logits: NDArray[Any], row: SampleRow) -> Sampled:
    """The next token of one row, from logits [vocabulary]."""
    try:
        stages = shape(logits, row)
    except NoToken as why:
        return Sampled(-1, None, str(why))
    token = _draw(stages[-1], row)
    params = row.params
    if params.trace:
        return Sampled(token, _traced(logits, token, max(params.logprobs or 0, params.trace), stages))
    if params.logprobs is not None:
        return Sampled(token, token_logprob(logits, token, params.logprobs))
    return Sampled(token)


def distribution(logits: NDArray[Any], row: SampleRow) -> Scores:
    """What `sample_one` draws from: probabilities [vocabulary], all 0 where no token can be drawn."""
    try:
        return filters.softmax(shape(logits, row)[-1])
    except NoToken:
        return np.zeros(len(logits))


def shape(logits: NDArray[Any], row: SampleRow) -> list[Scores]:
    """Scores [vocabulary] of the model and after: penalties, temperature, top_k, top_p, min_p, the rest.

    Raises NoToken."""
    model = np.asarray(logits, dtype=np.float64)
    if np.isnan(model).any() or (model == np.inf).any():
        raise NoToken(NOT_FINITE_ERROR)
    penalised = penalise(constrain(model, row), row)
    if not penalised.max() > CUT:
        raise NoToken(ALL_CUT_ERROR)
    stages = [model, penalised, warm(penalised, row.params)]
    params = row.params
    for control, on in (
        (filters.top_k, params.top_k > 0),
        (filters.top_p, params.top_p < 1.0),
        (filters.min_p, params.min_p > 0.0),
    ):
        value: Any = getattr(params, control.__name__)
        stages.append(control(stages[-1], value) if on else stages[-1])
    stages.append(cut_rest(stages[-1], penalised, model, row))
    return stages


def constrain(scores: Scores, row: SampleRow) -> Scores:
    """Bias, and what may not come at all."""
    params = row.params
    if params.logit_bias:
        scores = filters.bias(scores, params.logit_bias)
    if params.allowed_token_ids:
        scores = filters.allow_only(scores, params.allowed_token_ids)
    if params.bad_words:
        scores = filters.ban_words(scores, params.bad_words, row.state.history.ids)
    if row.banned:
        scores = filters.ban(scores, row.banned)
    return scores


def penalise(scores: Scores, row: SampleRow) -> Scores:
    """Penalties on what has occurred."""
    params, occurrences = row.params, row.state.occurrences
    if params.repetition_penalty != 1.0:
        scores = filters.repetition(scores, occurrences.seen(), params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        ids, counts = occurrences.in_output()
        scores = filters.presence_frequency(scores, ids, counts, params.presence_penalty, params.frequency_penalty)
    if params.dry_multiplier > 0:
        reach = min(params.dry_range or MAX_DRY_RANGE, MAX_DRY_RANGE)
        recent = row.state.history.ids[-reach:]
        scores = filters.dry(
            scores, recent, params.dry_breakers, params.dry_multiplier, params.dry_base, params.dry_allowed_length
        )
    return scores


def warm(scores: Scores, params: SamplingParams) -> Scores:
    """Temperature; at 0 all but the best token are cut."""
    if params.temperature == 0:
        return filters.top_k(scores, 1)
    value = params.temperature
    if params.dynatemp_range > 0:
        value = filters.dynamic_temperature(scores, value, params.dynatemp_range, params.dynatemp_exponent)
    return filters.temperature(scores - scores.max(), value)


def cut_rest(scores: Scores, penalised: Scores, model: Scores, row: SampleRow) -> Scores:
    """typical_p, top_n_sigma and XTC; `penalised` are the scores before temperature, `model` the model's own."""
    params = row.params
    if params.temperature == 0:
        return scores
    if params.typical_p < 1.0:
        scores = filters.typical_p(scores, params.typical_p)
    if params.top_n_sigma > 0:
        scores = filters.top_n_sigma(scores, penalised, model, params.top_n_sigma)
    if params.xtc_probability > 0 and uniform(params.seed, row.choice, row.index, XTC) < params.xtc_probability:
        scores = filters.xtc(scores, params.xtc_threshold)
    return scores


def _draw(scores: Scores, row: SampleRow) -> int:
    """Inverse of the cumulative distribution, in order of the ids; the random number depends on the row alone."""
    weights = filters.weigh(scores)
    alive = np.flatnonzero(weights)
    cumulative = np.cumsum(weights[alive])
    target = uniform(row.params.seed, row.choice, row.index, DRAW) * cumulative[-1]
    return int(alive[min(int(np.searchsorted(cumulative, target, side="right")), len(alive) - 1)])


def token_logprob(logits: NDArray[Any], token: int, count: int) -> TokenLogprob:
    """A token under the model's own distribution, with the `count` best candidates."""
    scores = np.asarray(logits, dtype=np.float64)
    peak = scores.max()
    logprobs = scores - (peak + np.log(np.exp(scores - peak).sum()))
    mine = scores[token]
    rank = int((scores > mine).sum() + (scores[:token] == mine).sum())
    best = filters.best_first(scores)[:count]
    return TokenLogprob(token, float(logprobs[token]), rank, tuple((int(i), float(logprobs[i])) for i in best))


def _traced(logits: NDArray[Any], token: int, count: int, stages: Sequence[Scores]) -> TokenLogprob:
    plain = token_logprob(logits, token, count)
    probabilities = [filters.softmax(scores) for scores in stages]
    shown = [*(candidate for candidate, _ in plain.top), token]
    table = tuple(tuple(float(stage[shown_id]) for stage in probabilities) for shown_id in shown)
    return TokenLogprob(token, plain.logprob, plain.rank, plain.top, table, filters.entropy(probabilities[0]))
