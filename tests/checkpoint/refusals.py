"""What loading tests share: a refusal is one sentence, and the logits of a short prompt."""

import pytest

from model.checkpoint import CheckpointError, load
from tests.checkpoint.run_decoder import logits

IDS = [5, 17, 3, 80, 42, 9, 1]


def refused(path, backend, *words):
    """Loading is refused in one sentence that holds all the words."""
    with pytest.raises(CheckpointError) as caught:
        load(path, backend=backend)
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")
    for word in words:
        assert word in text, text


def refused_in_one_line(path, backend):
    """Whether loading is refused; an error other than CheckpointError ends the test."""
    try:
        load(path, backend=backend)
    except CheckpointError as error:
        return "\n" not in str(error)
    return False


def run(path, backend):
    """float32 [tokens, vocabulary] for the short prompt."""
    return logits(load(path, backend=backend).decoder, backend, IDS)
