"""Loading holds the model and one tensor, not more, and gives the file's pages back (measured in a process)."""

import json
import subprocess
import sys

import pytest

from bench.loading import Size, shapes, write_model

SIZE = Size(width=1024, wide=2816, layers=6, heads=16, kv_heads=4, vocabulary=16000)
PROGRAM = """
import json, sys
from bench.loading import measure
from model.checkpoint import read_spec
read_spec(sys.argv[1])  # imports what reads configurations: that memory is not loading's
print(json.dumps(measure(sys.argv[1], "auto" if sys.argv[2] == "auto" else "bfloat16", sys.argv[2])))
"""
SLACK = 48 << 20  # the allocator's arenas, the tables of pages, the header


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_peak_is_the_model_and_one_tensor(tmp_path, kernels):
    write_model(tmp_path, SIZE)
    largest = 2 * max(rows * columns for _, (rows, *rest) in shapes(SIZE) for columns in rest or [1])
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path), kernels], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    model = (tmp_path / "model.safetensors").stat().st_size
    assert model > 180e6
    assert figures["weights"] < 1.02 * model
    # The tensor being packed is there twice: once in the file's map, once packed, the second a part of the model.
    assert figures["peak"] - figures["before"] < figures["weights"] + largest + SLACK
    assert figures["after"] - figures["before"] < figures["weights"] + SLACK
