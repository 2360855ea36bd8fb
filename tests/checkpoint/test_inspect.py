"""`inspect` prints what a model is made of without its weights, and one line for a broken one."""

import json
import os
import subprocess
import sys

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from model.checkpoint.inspect import main
from tests.checkpoint import tiny_gguf


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.gguf"
    tiny_gguf.write_llama(path)
    return path


def test_a_table_a_person_can_read(tiny, capsys):
    assert main([str(tiny)]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    for word in (
        "llama",
        "4 heads of 16, 2 for keys",
        "rotary, base 10,000",
        "Q8_0",
        "none, sinks, window, restart",
        "dropped",
    ):
        assert word in shown.out


def test_counts_are_those_of_the_tensors(tiny, capsys):
    assert main([str(tiny), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    tensors = tiny_gguf.llama_tensors()
    assert facts["parameters"]["total"] == sum(array.size for array in tensors.values())
    assert facts["parameters"]["embedding"] == facts["parameters"]["head"] == 96 * 64
    assert facts["parameters"]["norms"] == 5 * 64
    assert facts["kv_bytes_per_token"]["float32"] == 2 * 2 * 2 * 16 * 4
    assert facts["bytes"]["Q8_0"] == sum(array.size for array in tensors.values() if array.ndim == 2) // 32 * 34
    assert facts["context"] == 128


def test_the_default_model(default_model, capsys):
    assert main([str(default_model), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["parameters"]["total"] == 134_515_008
    assert (facts["layers"], facts["context"], facts["eos_token_ids"]) == (30, 8192, [2])


def test_a_fused_family_is_counted_by_part(tmp_path, capsys):
    shape = {"vocab_size": 96, "n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=1))
    model.save_pretrained(tmp_path)
    assert main([str(tmp_path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["parameters"]["total"] == sum(tensor.numel() for tensor in model.parameters())
    assert facts["parameters"]["attention"] == 2 * (24 * 72 + 72 + 24 * 24 + 24)
    assert facts["retention"]["honoured"] == ["none", "restart"]
    assert "learned" in facts["retention"]["refused"]["sinks"]
    assert facts["positions"] == ["learned, 32 positions"]


@pytest.mark.parametrize("damage", ["missing", "cut", "absent"])
def test_something_broken_is_one_line(tiny, capsys, damage):
    if damage == "missing":
        tensors = tiny_gguf.llama_tensors()
        tensors.pop("blk.1.ffn_down.weight")
        tiny_gguf.write_llama(tiny, tensors=tensors)
    elif damage == "cut":
        os.truncate(tiny, 5000)
    else:
        tiny.unlink()
    assert main([str(tiny)]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert shown.err.startswith("error: ")
    assert str(tiny) in shown.err


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["--strange", "a"]])
def test_wrong_arguments_are_one_line(capsys, arguments):
    assert main(arguments) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_as_a_process(tiny):
    done = subprocess.run(
        [sys.executable, "-m", "model.checkpoint.inspect", str(tiny)], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert "llama" in done.stdout


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_reader_that_leaves_is_no_error(tiny, flags):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "model.checkpoint.inspect", str(tiny), *flags]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    os.close(write)
    assert done.stderr == ""
