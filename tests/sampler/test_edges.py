"""The ends of every range, damaged logits, and what is remembered of a stream."""

import random
from collections import Counter

import numpy as np
import pytest
import torch

from model.engine.sampler import SamplerState
from model.engine.sampler_state import History
from model.protocol import MAX_DRY_RANGE, SamplingParams, history_length
from tests.sampler.rows import make_logits, make_row

EXTREMES = [
    {"temperature": 1e-300},
    {"temperature": 1e-6},
    {"temperature": 1e-3},
    {"temperature": 2.0},
    {"top_p": 1e-12},
    {"top_p": 1 - 1e-12},
    {"min_p": 1.0},
    {"min_p": 1e-30},
    {"typical_p": 1e-9},
    {"typical_p": 1 - 1e-12},
    {"top_k": 1},
    {"top_k": 10_000_000},
    {"top_n_sigma": 1e-6},
    {"top_n_sigma": 100.0},
    {"xtc_probability": 1.0, "xtc_threshold": 0.0},
    {"dynatemp_range": 2.0, "temperature": 1.0},
    {"dynatemp_range": 2.0, "temperature": 1.0, "dynatemp_exponent": 10.0},
    {"logit_bias": ((3, 100.0), (4, -100.0))},
    {"repetition_penalty": 1e-300},
    {"repetition_penalty": 1e-3},
    {"repetition_penalty": 10.0},
    {"presence_penalty": 2.0, "frequency_penalty": 2.0},
    {"dry_multiplier": 10.0, "dry_base": 10.0, "dry_allowed_length": 1},
]
SHAPES = {
    "random": make_logits(1)[0],
    "all equal": torch.zeros(1000),
    "one hot": torch.where(torch.arange(1000) == 500, 80.0, -80.0),
    "two peaks": torch.where(torch.arange(1000) % 500 == 3, 10.0, -1.0),
    "huge": make_logits(1)[0] * 1e35,
    "mostly cut": torch.where(torch.arange(1000) % 300 == 7, 1.0, -torch.inf),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fields", EXTREMES, ids=str)
def test_at_the_ends_of_its_range_a_control_still_leaves_a_token(fields, shape, make_sampler):
    logits = SHAPES[shape][None]
    stream = [1, 2, 3] * 200
    row = make_row(SamplingParams(seed=9, **fields), stream, stream)
    sampler = make_sampler(1000)
    chances = sampler.distributions(logits, [row])[0]
    assert np.isfinite(chances).all()
    assert chances.sum() == pytest.approx(1.0, abs=1e-3)
    token = sampler.sample(logits, [row])[0].token
    assert chances[token] > 0


def test_damaged_logits_fail_their_row_alone(make_sampler):
    logits = make_logits(5)
    logits[1, 999] = torch.nan
    logits[2, 0] = torch.inf
    logits[3] = -torch.inf
    logits[4, 5] = -torch.inf
    greedy = SamplingParams(temperature=0.0, logprobs=2)
    results = make_sampler(1000).sample(logits, [make_row(greedy) for _ in range(5)])
    assert [one.token for one in results] == [int(logits[0].argmax()), -1, -1, -1, int(logits[4].argmax())]
    assert "NaN or infinity" in results[1].error
    assert "NaN or infinity" in results[2].error
    assert "no token is left" in results[3].error
    assert results[0].error == results[4].error == ""


def test_controls_that_rule_out_everything_are_an_error_in_a_sentence(make_sampler):
    params = SamplingParams(allowed_token_ids=(4, 5), bad_words=((4,),))
    rows = [make_row(params, banned=(5,)), make_row(params)]
    results = make_sampler(1000).sample(make_logits(2), rows)
    assert results[0].error.startswith("no token is left to draw")
    assert results[1].token == 5


@pytest.mark.parametrize("vocabulary", [1, 2, 7, 63, 64, 65, 1000])
def test_every_vocabulary_has_its_last_token(vocabulary, make_sampler):
    logits = torch.zeros(1, vocabulary)
    logits[0, -1] = 5.0
    sampler = make_sampler(vocabulary)
    for params in (
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=1),
        SamplingParams(top_p=0.01),
        SamplingParams(temperature=0.01, logprobs=3),
    ):
        assert sampler.sample(logits, [make_row(params)])[0].token == vocabulary - 1


def test_logprobs_are_the_models_own_with_ranks_and_ties_by_id(make_sampler):
    logits = make_logits(1)
    logits[0, [10, 20, 30]] = float(logits.max()) + 1
    params = SamplingParams(temperature=0.3, top_k=2, logprobs=5, logit_bias=((20, 60.0),))
    one = make_sampler(1000).sample(logits, [make_row(params)])[0]
    expected = logits.double().log_softmax(-1)[0]
    assert one.token == 20
    assert one.logprob.logprob == pytest.approx(float(expected[20]), abs=1e-5)
    assert one.logprob.rank == 1
    assert [token for token, _ in one.logprob.top[:3]] == [10, 20, 30]
    assert [x for _, x in one.logprob.top] == pytest.approx(expected.topk(5).values.tolist(), abs=1e-5)


def test_prompt_logprobs_equal_log_softmax(make_sampler):
    logits = make_logits(7, 1000)
    ids = [0, 999, 5, 6, 7, 8, int(logits[6].argmax())]
    expected = logits.double().log_softmax(-1)
    for count in (0, 1, 20):
        results = make_sampler(1000).prompt_logprobs(logits, ids, count)
        assert [one.token for one in results] == ids
        assert [one.logprob for one in results] == pytest.approx(
            [float(expected[place, token]) for place, token in enumerate(ids)], abs=1e-5
        )
        for place, one in enumerate(results):
            assert one.rank == int((logits[place] > logits[place, ids[place]]).sum())
            assert [token for token, _ in one.top] == logits[place].topk(count).indices.tolist()


def test_a_trace_shows_where_each_candidate_is_cut(make_sampler):
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.04, 0.01]]).log()
    params = SamplingParams(temperature=0.5, top_k=4, top_p=0.9, min_p=0.5, trace=5, seed=2)
    one = make_sampler(5).sample(logits, [make_row(params)])[0].logprob
    assert one.token == 0  # 0.5 ** 2 against 0.3 ** 2: min_p leaves the first alone
    assert one.entropy == pytest.approx(float(-(logits.exp() * logits).sum()), abs=1e-5)
    warm = (logits.exp()[0] ** 2).numpy()
    assert [line[0] for line in one.stages[:5]] == pytest.approx([0.5, 0.3, 0.15, 0.04, 0.01], abs=1e-6)
    assert [line[2] for line in one.stages[:5]] == pytest.approx(list(warm / warm.sum()), abs=1e-5)
    assert [line[3] for line in one.stages[:5]] == pytest.approx([*(warm[:4] / warm[:4].sum()), 0.0], abs=1e-5)
    assert [line[4] for line in one.stages[:5]] == pytest.approx([*(warm[:2] / warm[:2].sum()), 0, 0, 0], abs=1e-5)
    assert [line[5] for line in one.stages[:5]] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert one.stages[5] == one.stages[0]


def test_a_greedy_trace_is_certain_after_temperature(make_sampler):
    params = SamplingParams(temperature=0.0, trace=3)
    one = make_sampler(1000).sample(make_logits(1), [make_row(params)])[0].logprob
    assert [line[2:] for line in one.stages] == [(1.0,) * 5, (0.0,) * 5, (0.0,) * 5, (1.0,) * 5]


@pytest.mark.parametrize("reach", [0, 1, 5, 40])
def test_occurrences_are_counted_as_by_hand(reach):
    rng = random.Random(reach)
    prompt = [rng.randrange(20) for _ in range(30)]
    params = SamplingParams(repetition_penalty=1.1, penalty_range=reach)
    state = SamplerState.start(params, prompt, ())
    output = []
    for _ in range(150):
        output.append(rng.randrange(20))
        state.append(output[-1])
        stream = prompt + output
        recent = stream[-reach:] if reach else stream
        recent_output = recent[max(0, len(recent) - len(output)) :]
        assert set(state.occurrences.seen().tolist()) == set(recent)
        ids, counts = state.occurrences.in_output()
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == dict(Counter(recent_output))


@pytest.mark.parametrize("reach", [0, 7])
def test_a_state_is_rebuilt_exactly_from_the_tail_and_counts(reach, make_sampler):
    params = SamplingParams(
        seed=4, repetition_penalty=1.3, frequency_penalty=0.4, penalty_range=reach, dry_multiplier=1.0, dry_range=50
    )
    sampler, logits = make_sampler(1000), make_logits(1)
    logits[0, :12] += 9.0  # a stream over few ids, so that all controls bite
    prompt, output = [1, 2, 3, 4, 1, 2], []
    state = SamplerState.start(params, prompt, ())
    for index in range(200):
        row = make_row(params, index=index)
        token = sampler.sample(logits, [type(row)(params, state, 0, index)])[0].token
        if index > 100 and index % 20 == 0:
            whole = SamplerState.start(params, prompt, output)
            counts = tuple(sorted(Counter(output).items()))
            cut = SamplerState.start(params, prompt, output[-history_length(params) :], counts)
            for other in (whole, cut):
                again = sampler.distributions(logits, [type(row)(params, other, 0, index)])
                assert np.array_equal(again, sampler.distributions(logits, [type(row)(params, state, 0, index)]))
        state.append(token)
        output.append(token)


def test_an_endless_stream_is_remembered_in_bounded_memory():
    params = SamplingParams(dry_multiplier=1.0, repetition_penalty=1.2, penalty_range=100)
    state = SamplerState.start(params, range(50), ())
    for index in range(3 * MAX_DRY_RANGE):
        state.append(index % 300)
    assert len(state.history.ids) == MAX_DRY_RANGE
    assert len(state.history._buffer) == 2 * MAX_DRY_RANGE
    assert state.occurrences.size <= 300
    assert len(state.occurrences.ids) <= 512
    plain = SamplerState.start(SamplingParams(), range(50), ())
    for index in range(1000):
        plain.append(index)
    assert len(plain.history.ids) == plain.occurrences.size == 0


def test_history_is_the_last_ids_in_one_piece():
    for length in (1, 2, 5):
        history, plain = History(length, [7, 8]), [7, 8]
        for token in range(40):
            history.append(token)
            plain.append(token)
            assert history.ids.tolist() == plain[-length:]


def test_how_much_history_controls_need():
    assert history_length(SamplingParams()) == 0
    assert history_length(SamplingParams(bad_words=((1,), (1, 2, 3)))) == 2
    assert history_length(SamplingParams(penalty_range=10)) == 0
    assert history_length(SamplingParams(penalty_range=10, presence_penalty=0.1)) == 10
    assert history_length(SamplingParams(dry_multiplier=1.0)) == MAX_DRY_RANGE
    assert history_length(SamplingParams(dry_multiplier=1.0, dry_range=9)) == 9
