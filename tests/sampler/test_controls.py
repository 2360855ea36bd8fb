"""Each control's distribution against transformers' processor where it has one, else against the paper in numpy."""

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from model.engine.sampler_random import XTC, uniform
from model.protocol import MAX_DRY_RANGE, SamplingParams
from tests.sampler.rows import VOCABULARY, make_logits, make_row

ROWS = 6
PROMPT = (5, 9, 5, 7, 11)
OUTPUT = (9, 9, 3, 5, 7)


def distributions(make_sampler, logits, params, banned=()):
    rows = [make_row(params, PROMPT, OUTPUT, banned=banned) for _ in range(len(logits))]
    return make_sampler(logits.shape[1]).distributions(logits, rows)


def by_processors(logits, *processors):
    scores = logits.double()
    ids = torch.tensor([PROMPT + OUTPUT] * len(logits))
    for processor in processors:
        scores = processor(ids, scores)
    return scores.softmax(-1).numpy()


TYPICAL = [0.05, 0.2, 0.5, 0.9, 0.99]
CASES = {
    **{f"temperature {t}": ({"temperature": t}, [hf.TemperatureLogitsWarper(t)]) for t in (0.05, 0.5, 1.3, 2.0)},
    **{f"top_k {k}": ({"top_k": k}, [hf.TopKLogitsWarper(k)]) for k in (1, 2, 15, 40, 999, 1000, 5000)},
    **{f"top_p {p}": ({"top_p": p}, [hf.TopPLogitsWarper(p)]) for p in (1e-6, 0.1, 0.5, 0.9, 0.95, 0.999)},
    **{f"min_p {p}": ({"min_p": p}, [hf.MinPLogitsWarper(p)]) for p in (1e-4, 0.02, 0.1, 0.9, 1.0)},
    **{f"typical_p {p}": ({"typical_p": p}, [hf.TypicalLogitsWarper(p)]) for p in TYPICAL},
    **{
        f"repetition {r}": ({"repetition_penalty": r}, [hf.RepetitionPenaltyLogitsProcessor(r)])
        for r in (0.6, 1.2, 5.0)
    },
    "bad words": (
        {"bad_words": ((7,), (7, 8), (5, 7, 20), (6, 7, 21), (1, 9, 5, 7, 11, 9, 9, 3, 5, 7, 22), (400, 401))},
        [hf.NoBadWordsLogitsProcessor([[7], [7, 8], [5, 7, 20], [6, 7, 21], [400, 401]], eos_token_id=None)],
    ),
    "bias": (
        {"logit_bias": ((4, 8.0), (8, -100.0), (999, 3.5))},
        [hf.SequenceBiasLogitsProcessor([[[4], 8.0], [[8], -100.0], [[999], 3.5]])],
    ),
    "allowed": (
        {"allowed_token_ids": (3, 3, 77, 500)},
        [hf.SuppressTokensLogitsProcessor([i for i in range(VOCABULARY) if i not in (3, 77, 500)])],
    ),
    "several": (
        {"repetition_penalty": 1.3, "temperature": 0.8, "top_k": 60, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.9},
        [
            hf.RepetitionPenaltyLogitsProcessor(1.3),
            hf.TemperatureLogitsWarper(0.8),
            hf.TopKLogitsWarper(60),
            hf.TopPLogitsWarper(0.95),
            hf.MinPLogitsWarper(0.02),
            hf.TypicalLogitsWarper(0.9),
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_distribution_equals_that_of_transformers(name, make_sampler):
    fields, processors = CASES[name]
    logits = make_logits(ROWS, seed=len(name))
    ours = distributions(make_sampler, logits, SamplingParams(**fields))
    theirs = by_processors(logits, *processors)
    assert np.array_equal(ours > 1e-30, theirs > 1e-30)
    np.testing.assert_allclose(ours, theirs, atol=2e-6, rtol=2e-4)


@pytest.mark.parametrize("penalty", [0.5, -1.0])
def test_presence_and_frequency_look_at_the_output_alone(penalty, make_sampler):
    logits = make_logits(2)
    expected = logits.double()
    for token in set(OUTPUT):
        expected[:, token] -= penalty + 0.25 * OUTPUT.count(token)
    ours = distributions(make_sampler, logits, SamplingParams(presence_penalty=penalty, frequency_penalty=0.25))
    np.testing.assert_allclose(ours, expected.softmax(-1).numpy(), atol=2e-6, rtol=2e-4)


def test_penalties_with_a_range_forget_what_is_further_back(make_sampler):
    logits = make_logits(2)
    params = SamplingParams(presence_penalty=1.0, repetition_penalty=1.5, penalty_range=3)
    expected = logits.double()
    for token in (3, 5, 7):  # the last three ids
        seen = expected[:, token]
        expected[:, token] = torch.where(seen > 0, seen / 1.5, seen * 1.5) - 1.0
    ours = distributions(make_sampler, logits, params)
    np.testing.assert_allclose(ours, expected.softmax(-1).numpy(), atol=2e-6, rtol=2e-4)


def test_banned_ids_cannot_come(make_sampler):
    logits = make_logits(1)
    logits[0, 17] = 50.0
    assert distributions(make_sampler, logits, SamplingParams(), banned=(17, 18))[0, [17, 18]].sum() == 0
    params = SamplingParams(temperature=0.0)
    token = make_sampler(VOCABULARY).sample(logits, [make_row(params, banned=(17,))])[0].token
    assert token != 17


def phrase_penalties(stream, multiplier, base, allowed, breakers=()):
    """DRY by its description: for each token, how long a phrase its coming would repeat."""
    penalties = {}
    for token in set(stream):
        for length in range(len(stream), 0, -1):
            phrase = stream[len(stream) - length :]
            if token in breakers or any(part in breakers for part in phrase):
                continue
            places = range(len(stream) - length)
            if any(stream[i : i + length] == phrase and stream[i + length] == token for i in places):
                if length >= allowed:
                    penalties[token] = multiplier * base ** (length - allowed)
                break
    return penalties


@pytest.mark.parametrize("breakers", [(), (2,), (3,)])
@pytest.mark.parametrize("allowed", [1, 2, 4])
def test_dry_penalises_what_would_go_on_with_a_repeated_phrase(allowed, breakers, make_sampler):
    rng = np.random.default_rng(allowed)
    for size in (0, 1, 2, 3, 10, 40, 80):
        stream = rng.integers(0, 4, size).tolist()
        stream += stream[:6]
        logits = make_logits(1, seed=size)
        params = SamplingParams(
            dry_multiplier=0.8, dry_base=1.4, dry_allowed_length=allowed, dry_breakers=breakers, dry_range=30
        )
        expected = logits.double()
        for token, penalty in phrase_penalties(stream[-30:], 0.8, 1.4, allowed, breakers).items():
            expected[0, token] -= penalty
        ours = make_sampler(VOCABULARY).distributions(logits, [make_row(params, stream)])
        np.testing.assert_allclose(ours, expected.softmax(-1).numpy(), atol=2e-6, rtol=2e-4)


@pytest.mark.parametrize("period", [1, 2, 7])
def test_dry_is_right_and_quick_on_a_stream_that_only_repeats_itself(period, make_sampler):
    """Every place matches at every length there: looking at each would take the square of the stream."""
    stream = [index % period for index in range(MAX_DRY_RANGE)]
    logits = make_logits(1)
    params = SamplingParams(dry_multiplier=1e-3, dry_base=1.0005, dry_allowed_length=2)
    expected = logits.double()
    expected[0, len(stream) % period] -= 1e-3 * 1.0005 ** (len(stream) - period - 2)
    ours = make_sampler(VOCABULARY).distributions(logits, [make_row(params, stream)])
    np.testing.assert_allclose(ours, expected.softmax(-1).numpy(), atol=2e-6, rtol=5e-4)


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_dynamic_temperature_follows_the_entropy(exponent, make_sampler):
    logits = make_logits(ROWS, scale=2.5)
    params = SamplingParams(temperature=1.0, dynatemp_range=0.6, dynatemp_exponent=exponent)
    plain = logits.double().softmax(-1)
    share = -(plain * plain.log()).sum(-1) / np.log(VOCABULARY)
    value = 0.4 + 1.2 * share**exponent
    expected = (logits.double() / value[:, None]).softmax(-1).numpy()
    np.testing.assert_allclose(distributions(make_sampler, logits, params), expected, atol=2e-6, rtol=5e-4)


@pytest.mark.parametrize("count", [0.5, 1.0, 2.5])
@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_top_n_sigma_keeps_the_same_tokens_at_every_temperature(count, temperature, make_sampler):
    logits = make_logits(ROWS)
    ours = distributions(make_sampler, logits, SamplingParams(temperature=temperature, top_n_sigma=count))
    deviation = logits.double().std(-1, correction=0, keepdim=True)
    kept = logits >= logits.max(-1, keepdim=True).values - count * deviation
    expected = (logits.double() / temperature).masked_fill(~kept, -np.inf).softmax(-1).numpy()
    np.testing.assert_allclose(ours, expected, atol=2e-6, rtol=2e-4)


def test_xtc_cuts_all_likely_tokens_but_the_least_of_them(make_sampler):
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.06, 0.04]]).log()
    sampler = make_sampler(5)

    def after(threshold, probability=1.0, index=0):
        params = SamplingParams(xtc_probability=probability, xtc_threshold=threshold, seed=3)
        return sampler.distributions(logits, [make_row(params, index=index)])[0]

    np.testing.assert_allclose(after(0.1), np.array([0, 0, 0.2, 0.06, 0.04]) / 0.3, atol=1e-6)
    np.testing.assert_allclose(after(0.35), logits.exp()[0].numpy(), atol=1e-6)
    np.testing.assert_allclose(after(0.6), logits.exp()[0].numpy(), atol=1e-6)
    cut = [after(0.1, probability=0.3, index=i)[0] == 0 for i in range(400)]
    assert cut == [uniform(3, 0, i, XTC) < 0.3 for i in range(400)]
    assert 90 < sum(cut) < 150


def test_greedy_obeys_penalties_and_takes_the_first_of_equals(make_sampler):
    logits = torch.zeros(1, 100)
    logits[0, [40, 60]] = 2.0
    sampler = make_sampler(100)
    greedy = SamplingParams(temperature=0.0)
    assert sampler.sample(logits, [make_row(greedy)])[0].token == 40
    penalised = SamplingParams(temperature=0.0, presence_penalty=1.0)
    assert sampler.sample(logits, [make_row(penalised, output=(40,))])[0].token == 60


def test_worked_examples(make_sampler):
    """Top-k on five verbs, temperature on [4, 2, 1], top-p on 70, 15, 8, 3, 4 percent."""
    verbs = torch.tensor([[4.2, 3.8, 2.1, 1.9, 0.3]])
    ours = make_sampler(5).distributions(verbs, [make_row(SamplingParams(top_k=3))])[0]
    np.testing.assert_allclose(ours, [*torch.tensor([4.2, 3.8, 2.1]).softmax(0).tolist(), 0, 0], atol=1e-6)
    warm = torch.tensor([[4.0, 2.0, 1.0]])
    for value, same in ((0.5, [8.0, 4.0, 2.0]), (2.0, [2.0, 1.0, 0.5])):
        ours = make_sampler(3).distributions(warm, [make_row(SamplingParams(temperature=value))])[0]
        np.testing.assert_allclose(ours, torch.tensor(same).softmax(0), atol=1e-6)
    shares = torch.tensor([[0.70, 0.15, 0.08, 0.03, 0.04]]).log()
    ours = make_sampler(5).distributions(shares, [make_row(SamplingParams(top_p=0.9))])[0]
    np.testing.assert_allclose(ours, np.array([0.70, 0.15, 0.08, 0, 0]) / 0.93, atol=1e-6)
