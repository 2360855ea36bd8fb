"""The default model, greedy in float32, against the reference implementation: ten prompts, 64 tokens each.

The reference's ids are stored (make_default_reference.py made them); a live check holds that they are still
what the reference says. Our side runs through the engine with its default kernels, and the torch backend alone.
"""

import json
from pathlib import Path

import pytest
import torch

from model import checkpoint, worker
from model.config import EngineConfig
from model.decoder.kernels.select import choose
from model.protocol import SamplingParams, Step, Submit
from tests.parity.make_default_reference import FILE, TOKENS, load_reference
from tests.parity.paged import Paged, Stream

ROWS = json.loads(Path(FILE).read_text())
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)


@pytest.mark.timeout(300)
def test_the_engine_equals_the_reference_token_for_token(default_model):
    config = EngineConfig(model=str(default_model), name="", socket="", dtype="float32", num_blocks=400)
    engine, _ = worker.build(config)
    for row in ROWS:
        engine.submit(Submit(row["name"], 0, tuple(row["prompt"]), GREEDY))
    outputs: dict[str, list[int]] = {row["name"]: [] for row in ROWS}
    while engine.has_work:
        for message in engine.step():
            assert isinstance(message, Step)
            for part in message.rows:
                outputs[part.request].extend(part.tokens)
    for row in ROWS:
        assert outputs[row["name"]] == row["output"], row["name"]


@pytest.mark.timeout(300)
def test_the_torch_backend_does_too(default_model):
    """All but the longest, which take torch long and have nothing that the others have not."""
    rows = [row for row in ROWS if len(row["prompt"]) < 200]
    backend = choose("cpu", "float32", "reference", 1)
    decoder = checkpoint.load(default_model, backend=backend).decoder
    paged = Paged(decoder, backend, num_blocks=128, block_size=16)
    streams = [Stream() for _ in rows]
    parts = [(stream, row["prompt"]) for stream, row in zip(streams, rows, strict=True)]
    outputs = [[int(logits[0].argmax())] for logits in paged.step(parts, all_rows=False)]
    for _ in range(TOKENS - 1):
        parts = [(stream, output[-1:]) for stream, output in zip(streams, outputs, strict=True)]
        for output, logits in zip(outputs, paged.step(parts, all_rows=False), strict=True):
            output.append(int(logits[0].argmax()))
    for row, output in zip(rows, outputs, strict=True):
        assert output == row["output"], row["name"]


def test_the_stored_prompts_are_what_they_should_be():
    lengths = [len(row["prompt"]) for row in ROWS]
    assert len(ROWS) == 10
    assert max(lengths) == 3_000
    assert len(set(lengths)) >= 9
    assert all(len(row["output"]) == TOKENS for row in ROWS)
    assert all(row["smallest_lead"] > 1e-3 for row in ROWS)  # no continuation hangs on a tie


@pytest.mark.timeout(300)
def test_the_stored_ids_are_the_reference_s(default_model):
    reference = load_reference(default_model)
    for row in ROWS:
        if row["name"] not in ("Korean", "code", "one word"):
            continue
        ids = row["prompt"] + row["output"]
        with torch.inference_mode():
            logits = reference(torch.tensor([ids[:-1]]), use_cache=False, logits_to_keep=TOKENS).logits[0]
        assert logits.argmax(dim=-1).tolist() == row["output"]
