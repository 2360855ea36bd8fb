"""What is kept of a choice for a resume: everything, or under retention exactly what a replay needs."""

import pytest

from app.ledger import Ledger, replay_length
from model.protocol import Retention


def test_replay_length_follows_the_layers():
    sinks = Retention("sinks", sink_tokens=4, window=508)
    assert replay_length(sinks, (0,) * 30) == 1 + 30 * 507 == 15_211  # the default model
    assert replay_length(sinks, (64, 0, 64)) == 1 + 63 + 507 + 63
    assert replay_length(sinks, (64,)) == 512  # never less than what the cache itself holds
    assert replay_length(Retention("restart", 4, 508), (0,) * 30) == 512
    assert replay_length(Retention(), (0,) * 30) == 0


def test_without_retention_everything_stays():
    ledger = Ledger(0, 3, Retention(), (0, 0), 16)
    for token in range(5000):
        ledger.append(token)
    resume = ledger.resume()
    assert resume.tail == tuple(range(5000))
    assert (resume.tail_start, resume.num_output_tokens, resume.counts, resume.head) == (3, 5000, (), ())


@pytest.mark.parametrize("prompt_length", [1, 3, 4, 100])
def test_under_retention_memory_is_bounded_and_positions_are_true(prompt_length):
    retention = Retention("sinks", sink_tokens=4, window=8)
    ledger = Ledger(2, prompt_length, retention, (0, 0, 4), 16)
    keep = replay_length(retention, (0, 0, 4)) + 16
    outputs = [token % 7 for token in range(1000)]
    for place, token in enumerate(outputs):
        ledger.append(token)
        assert ledger.held <= keep + 4 + 16
        resume = ledger.resume()
        assert resume.tail_start + len(resume.tail) == prompt_length + place + 1
        assert resume.tail == tuple(outputs[place + 1 - len(resume.tail) : place + 1])
    assert len(resume.tail) == keep
    assert resume.head == tuple(outputs[: max(0, 4 + 16 - prompt_length)])
    assert dict(resume.counts) == {token: outputs.count(token) for token in range(7)}
    assert resume.choice == 2


def test_the_ledger_keeps_what_sampling_controls_look_at():
    retention = Retention("window", window=8)
    short, long = Ledger(0, 3, retention, (0,), 16), Ledger(0, 3, retention, (0,), 16, history=100)
    for token in range(1000):
        short.append(token)
        long.append(token)
    assert len(short.resume().tail) < 100
    assert long.resume().tail[-100:] == tuple(range(900, 1000))
