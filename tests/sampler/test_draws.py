"""Draws: they follow the distribution, depend on (seed, choice, index) alone, and on no neighbour."""

import ctypes

import numpy as np
import pytest
import torch
from scipy import stats

from model.decoder.kernels.cpu.library import load_library
from model.engine.sampler import Sampler
from model.engine.sampler_random import DRAW, XTC, philox, uniform
from model.protocol import SamplingParams
from tests.sampler.rows import make_logits, make_row, random_row, samplers

SMALL = 24
CONTROLS = {
    "plain": {},
    "warm": {"temperature": 1.7},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "typical_p": {"typical_p": 0.7},
    "top_n_sigma": {"top_n_sigma": 1.5},
    "xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.1},
    "dynamic": {"dynatemp_range": 0.5},
    "bias": {"logit_bias": ((3, 2.0), (4, -3.0))},
    "several": {"temperature": 1.3, "top_k": 15, "top_p": 0.9, "min_p": 0.02},
}


@pytest.mark.parametrize("name", CONTROLS)
def test_a_hundred_thousand_draws_follow_the_distribution(name):
    logits = make_logits(1, SMALL, seed=5, scale=1.5)
    sampler = Sampler(SMALL)
    params = SamplingParams(seed=20240229, **CONTROLS[name])
    row = make_row(params)
    batch = 1000
    tokens = []
    for start in range(0, 100_000, batch):
        rows = [type(row)(params, row.state, 0, start + i) for i in range(batch)]
        tokens += [one.token for one in sampler.sample(logits.expand(batch, -1), rows)]
    expected = sampler.distributions(logits, [row])[0].astype(np.float64)
    counts = np.bincount(tokens, minlength=SMALL)
    assert counts[expected == 0].sum() == 0
    alive = expected > 0
    result = stats.chisquare(counts[alive], expected[alive] / expected[alive].sum() * counts.sum())
    assert result.pvalue > 0.001


def test_a_large_vocabulary_is_drawn_from_whole():
    """The draw goes by blocks; every block and every place in it gets its share."""
    sampler = Sampler(5000)
    params = SamplingParams(seed=1)
    row = make_row(params)
    logits = torch.zeros(1, 5000).expand(500, -1)
    tokens = []
    for start in range(0, 100_000, 500):
        rows = [type(row)(params, row.state, 0, start + i) for i in range(500)]
        tokens += [one.token for one in sampler.sample(logits, rows)]
    assert stats.chisquare(np.bincount(tokens, minlength=5000)).pvalue > 0.001


def test_choices_differ_and_the_same_seed_and_choice_repeat(make_sampler):
    sampler = make_sampler(1000)
    logits = make_logits(1).expand(40, -1)

    def story(seed, choice):
        params = SamplingParams(seed=seed)
        return [
            one.token for one in sampler.sample(logits, [make_row(params, choice=choice, index=i) for i in range(40)])
        ]

    stories = [story(seed, choice) for seed in (1, 2, -1) for choice in (0, 1, 2)]
    assert len({tuple(one) for one in stories}) == len(stories)
    assert story(2, 1) == story(2, 1)


def test_published_vectors_of_the_generator():
    """Random123's known answers for philox4x32 with ten rounds."""
    ones = 0xFFFFFFFF
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox(pi, (0xA4093822, 0x299F31D0)) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_both_languages_give_the_same_random_bits():
    library = load_library()
    if library is None:
        return  # nothing to compare with: the reference serves alone
    library.es_sample_uniform.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32]
    library.es_sample_uniform.restype = ctypes.c_double
    for seed, choice, index in ((0, 0, 0), (-1, 3, 10**7), (2**63 - 1, 127, 2**40), (-(2**63), 1, 5), (12345, 0, 7)):
        for purpose in (DRAW, XTC):
            theirs = library.es_sample_uniform(seed & (1 << 64) - 1, choice, index, purpose)
            assert theirs == uniform(seed, choice, index, purpose)
            assert 0.0 <= theirs < 1.0


def test_numbers_of_neighbouring_seeds_choices_and_places_are_unrelated():
    numbers = np.array([uniform(s, c, i, p) for s in range(10) for c in range(10) for i in range(50) for p in (0, 1)])
    assert stats.kstest(numbers, "uniform").pvalue > 0.01
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(numbers[:-100], numbers[100:])[0, 1]) < 0.03


@pytest.mark.parametrize("vocabulary", [1000, 1024])
def test_a_row_depends_on_no_neighbour_and_no_thread(vocabulary, make_sampler):
    """Bit for bit: alone, in a crowd, in another place, on two threads."""
    count = 24
    logits = make_logits(count, vocabulary)
    rows = [random_row(seed, vocabulary) for seed in range(count)]
    one, two = make_sampler(vocabulary, 1), make_sampler(vocabulary, 2)
    crowd, crowd_sampled = two.distributions(logits, rows), two.sample(logits, rows)
    turned = one.distributions(logits.flip(0), rows[::-1])[::-1]
    assert np.array_equal(crowd, turned)
    for place, row in enumerate(rows):
        alone = one.distributions(logits[place : place + 1], [row])[0]
        assert np.array_equal(alone, crowd[place])
        assert one.sample(logits[place : place + 1], [row])[0] == crowd_sampled[place]


def test_logits_are_left_as_they_are(make_sampler):
    logits = make_logits(10)
    before = logits.clone()
    make_sampler(1000).sample(logits, [random_row(seed) for seed in range(10)])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocabulary", [64, 1000, 2501])
def test_the_compiled_sampler_agrees_with_the_reference(vocabulary):
    """Distributions, tokens, log-probabilities, ranks, candidates and stages, over random controls."""
    both = samplers(vocabulary)
    rows = [random_row(seed, vocabulary) for seed in range(120)]
    logits = make_logits(len(rows), vocabulary, seed=vocabulary)
    fast, plain = (both[name].distributions(logits, rows) for name in ("compiled", "reference"))
    np.testing.assert_allclose(fast, plain, atol=2e-5)
    for one, other in zip(*(both[name].sample(logits, rows) for name in ("compiled", "reference")), strict=True):
        assert (one.token, one.error, one.logprob is None) == (other.token, other.error, other.logprob is None)
        if one.logprob is None:
            continue
        assert (one.logprob.token, one.logprob.rank) == (other.logprob.token, other.logprob.rank)
        assert [token for token, _ in one.logprob.top] == [token for token, _ in other.logprob.top]
        np.testing.assert_allclose([x for _, x in one.logprob.top], [x for _, x in other.logprob.top], atol=1e-5)
        np.testing.assert_allclose(np.array(one.logprob.stages), np.array(other.logprob.stages), atol=2e-5)
        assert (one.logprob.logprob, one.logprob.entropy) == pytest.approx(
            (other.logprob.logprob, other.logprob.entropy), abs=1e-4
        )
