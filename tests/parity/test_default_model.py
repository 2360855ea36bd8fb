"""The default model, greedy in float32, against the reference implementation: ten prompts, 64 tokens each.

The reference's ids are stored (make_default_reference.py made them); a live check holds that they are still
what the reference says.
"""

import json
from pathlib import Path

import pytest
import torch

from model import checkpoint
from model.decoder.kernels.select import choose
from tests.parity.make_default_reference import FILE, TOKENS, load_reference
from tests.parity.paged import Paged, Stream

ROWS = json.loads(Path(FILE).read_text())
CHUNK = 512


@pytest.fixture(autouse=True)
def two_threads(one_thread):
    """A real model: threads pay here."""
    torch.set_num_threads(2)


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_equals_the_reference_token_for_token(default_model, kernels):
    backend = choose("cpu", "float32", kernels, 2)
    decoder = checkpoint.load(default_model, backend=backend).decoder
    paged = Paged(decoder, backend, num_blocks=320, block_size=16)
    streams = [Stream() for _ in ROWS]
    outputs: list[list[int]] = [[] for _ in ROWS]
    for stream, row, output in zip(streams, ROWS, outputs, strict=True):
        for start in range(0, len(row["prompt"]), CHUNK):
            logits = paged.step([(stream, row["prompt"][start : start + CHUNK])], all_rows=False)[0]
        output.append(int(logits[0].argmax()))
    for _ in range(TOKENS - 1):
        parts = [(stream, output[-1:]) for stream, output in zip(streams, outputs, strict=True)]
        for output, logits in zip(outputs, paged.step(parts), strict=True):
            output.append(int(logits[0].argmax()))
    for row, output in zip(ROWS, outputs, strict=True):
        assert output == row["output"], row["name"]


def test_the_stored_prompts_are_what_the_issue_asks_for():
    lengths = [len(row["prompt"]) for row in ROWS]
    assert len(ROWS) == 10
    assert max(lengths) == 3_000
    assert len(set(lengths)) >= 9
    assert all(len(row["output"]) == TOKENS for row in ROWS)
    assert all(row["smallest_lead"] > 1e-3 for row in ROWS)  # no continuation hangs on a tie


def test_the_stored_ids_are_the_reference_s(default_model):
    reference = load_reference(default_model)
    for row in ROWS:
        if row["name"] not in ("Korean", "code", "one word"):
            continue
        ids = row["prompt"] + row["output"]
        with torch.inference_mode():
            logits = reference(torch.tensor([ids[:-1]]), use_cache=False, logits_to_keep=TOKENS).logits[0]
        assert logits.argmax(dim=-1).tolist() == row["output"]
