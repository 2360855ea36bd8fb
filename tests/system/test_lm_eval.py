"""lm-eval's `local-completions` against the service scores what the reference model scores through its own backend."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(300)
def test_the_same_score_as_the_reference_backend(real_server, default_model, tmp_path):
    server = real_server(dtype="float32", cache_bytes=1 << 28)
    script = str(Path(__file__).with_name("lm_eval_scores.py"))
    name = server._http.get("/v1/models").json()["data"][0]["id"]
    command = [sys.executable, script, server.url, name, str(default_model), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    served, reference = answer["served"], answer["reference"]
    assert served["scores"] == reference["scores"]
    assert len(served["scores"]) == 3
    assert served["said"]["capitals_free"] == reference["said"]["capitals_free"]
    for ours, theirs in zip(served["said"]["capitals"], reference["said"]["capitals"], strict=True):
        for (value, greedy), (expected, expected_greedy) in zip(ours, theirs, strict=True):
            assert float(value) == pytest.approx(float(expected), abs=2e-3)
            assert greedy == expected_greedy
