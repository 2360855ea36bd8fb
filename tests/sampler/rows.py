"""Rows for the sampler's tests: random logits, random controls, both samplers. No assertions here."""

import random

import torch

from model.engine.sampler import Sampler, SampleRow, SamplerState
from model.protocol import SamplingParams

VOCABULARY = 1000


def make_logits(rows, vocabulary=VOCABULARY, seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator) * scale


def make_row(params, prompt=(), output=(), choice=0, index=None, banned=()):
    state = SamplerState.start(params, prompt, output, ())
    return SampleRow(params, state, choice, len(output) if index is None else index, banned)


def random_params(rng: random.Random, vocabulary=VOCABULARY) -> SamplingParams:
    """Each control on in about one row of three."""

    def maybe(value, off):
        return value if rng.random() < 0.34 else off

    def token():
        return rng.randrange(vocabulary)

    return SamplingParams(
        temperature=rng.choice([0.0, 0.3, 0.7, 1.0, 1.0, 1.5, 2.0]),
        dynatemp_range=maybe(rng.uniform(0.1, 1.0), 0.0),
        dynatemp_exponent=rng.choice([1.0, 0.5, 2.0]),
        top_k=maybe(rng.choice([1, 2, 20, 100, vocabulary - 1, vocabulary + 5]), 0),
        top_p=maybe(rng.choice([0.01, 0.5, 0.9, 0.99]), 1.0),
        min_p=maybe(rng.choice([0.01, 0.1, 0.5, 1.0]), 0.0),
        typical_p=maybe(rng.choice([0.1, 0.5, 0.95]), 1.0),
        top_n_sigma=maybe(rng.uniform(0.5, 3.0), 0.0),
        xtc_probability=maybe(rng.choice([0.5, 1.0]), 0.0),
        xtc_threshold=rng.choice([0.0, 0.05, 0.1, 0.3]),
        dry_multiplier=maybe(rng.uniform(0.2, 3.0), 0.0),
        dry_base=rng.uniform(1.0, 2.0),
        dry_allowed_length=rng.choice([1, 2, 3]),
        dry_range=rng.choice([0, 0, 7, 30]),
        dry_breakers=tuple(rng.sample(range(12), rng.randrange(3))),
        repetition_penalty=maybe(rng.uniform(0.7, 1.6), 1.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        penalty_range=rng.choice([0, 0, 5, 20, 100]),
        logit_bias=maybe(tuple((token(), rng.uniform(-100, 10)) for _ in range(20)), ()),
        bad_words=maybe(tuple(tuple(rng.randrange(12) for _ in range(rng.randrange(1, 4))) for _ in range(8)), ()),
        allowed_token_ids=maybe(tuple({token() for _ in range(rng.choice([1, 30, 300]))} | {3}), ()),
        seed=rng.randrange(-(2**63), 2**63),
        logprobs=maybe(rng.choice([0, 1, 5]), None),
        trace=maybe(4, 0),
    )


def random_row(seed: int, vocabulary=VOCABULARY) -> SampleRow:
    """Controls and a stream over few ids, so that phrases repeat."""
    rng = random.Random(seed)
    prompt = [rng.randrange(12) for _ in range(rng.randrange(40))]
    output = [rng.randrange(12) for _ in range(rng.randrange(40))]
    banned = tuple(rng.sample(range(vocabulary), 3)) if rng.random() < 0.3 else ()
    return make_row(random_params(rng, vocabulary), prompt, output, rng.randrange(4), None, banned)


def samplers(vocabulary=VOCABULARY) -> dict[str, Sampler]:
    """Both, by name; without a compiler they are the same one."""
    return {"compiled": Sampler(vocabulary, 2), "reference": Sampler(vocabulary, compiled=False)}
