"""Loading GGUF keeps books: each parameter once, each tensor used or dropped by name, every fault one sentence."""

import os
import random
import shutil
import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch

from model.checkpoint import load, read_spec
from tests.checkpoint import tiny_gguf
from tests.checkpoint.refusals import refused, refused_in_one_line, run
from tests.checkpoint.run_decoder import reference_backend


@pytest.fixture(scope="module")
def backend():
    return reference_backend()


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.gguf"
    tiny_gguf.write_llama(path)
    return path


def test_books_of_a_gguf_file(tiny, backend):
    loaded = load(tiny, backend=backend)
    assert set(loaded.books.used) == set(tiny_gguf.llama_tensors())
    assert loaded.books.dropped == {}
    assert loaded.books.used["blk.1.ffn_down.weight"] == "layers.1.mlp.down"
    assert loaded.decoder.missing() == ()
    assert loaded.eos_token_ids == (1, 2)
    assert loaded.bos_token_id == 0
    assert read_spec(tiny) == loaded.spec


def test_every_truncation_point_is_one_sentence(tiny, backend):
    whole = tiny.stat().st_size
    for size in [*range(whole - 40, 0, -97), 0]:
        os.truncate(tiny, size)
        refused(tiny, backend, str(tiny))


def test_flipped_bytes_load_or_are_one_sentence(tiny, backend):
    """Damage anywhere, headers and weights alike: a clear refusal or a model, never another error."""
    original = tiny.read_bytes()
    header = gguf.GGUFReader(tiny).data_offset
    rng = random.Random(3)
    refusals = 0
    for turn in range(700):
        damaged = bytearray(original)
        for _ in range(rng.choice((1, 2, 16))):
            damaged[rng.randrange(header if turn % 4 else len(original))] ^= 1 << rng.randrange(8)
        tiny.write_bytes(damaged)
        refusals += refused_in_one_line(tiny, backend)
    assert refusals > 100


def rewrite(path, change, architecture="llama", **shape):
    tensors = tiny_gguf.llama_tensors(**shape)
    change(tensors)
    tiny_gguf.write_llama(path, tensors=tensors, architecture=architecture)


def test_an_unknown_architecture_names_those_that_are_known(tiny, backend):
    tiny_gguf.write_llama(tiny, architecture="hyena")
    refused(tiny, backend, "'hyena' is not known", "llama")


def test_a_missing_tensor(tiny, backend):
    rewrite(tiny, lambda tensors: tensors.pop("blk.1.ffn_down.weight"))
    refused(tiny, backend, "lacks 1 parameters (layers.1.mlp.down)")


def test_a_tensor_too_many(tiny, backend):
    rewrite(tiny, lambda tensors: tensors.update({"blk.0.strange.weight": np.ones((2, 32), np.float32)}))
    refused(tiny, backend, "'blk.0.strange.weight'", "have no place")


def test_a_tensor_of_a_layer_that_is_not_there(tiny, backend):
    rewrite(tiny, lambda tensors: tensors.update({"blk.9.attn_norm.weight": np.ones(64, np.float32)}))
    refused(tiny, backend, "'blk.9.attn_norm.weight'")


def test_a_tensor_of_another_shape(tiny, backend):
    rewrite(tiny, lambda tensors: tensors.update({"blk.0.attn_v.weight": np.ones((64, 64), np.float32)}))
    refused(tiny, backend, "'blk.0.attn_v.weight'", "does not fit")


def test_no_embedding(tiny, backend):
    rewrite(tiny, lambda tensors: tensors.pop("token_embd.weight"))
    refused(tiny, backend, "no token embedding")


def test_a_type_that_is_not_served(tiny, backend):
    writer = tiny_gguf.llama_writer(tiny)
    tiny_gguf.add_byte_vocabulary(writer)
    for name, array in tiny_gguf.llama_tensors().items():
        tiny_gguf.add(writer, name, array)
    raw = np.zeros((4, 210), np.uint8)
    writer.add_tensor("blk.0.attn_q.bias", raw, raw_dtype=gguf.GGMLQuantizationType.Q6_K)
    tiny_gguf.finish(writer)
    refused(tiny, backend, "Q6_K", "not served", "Q8_0")


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "attention.head_count"])
def test_configuration_that_is_not_there(tmp_path, backend, key):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in (("block_count", 2), ("embedding_length", 64), ("attention.head_count", 4)):
        if name != key:
            writer.add_uint32(f"llama.{name}", value)
    for name, array in tiny_gguf.llama_tensors().items():
        tiny_gguf.add(writer, name, array)
    tiny_gguf.finish(writer)
    refused(path, backend, str(path))


def test_nan_scales_load_and_give_nan_not_an_error(tiny, backend):
    file = gguf.GGUFReader(tiny)
    place = next(t.data_offset for t in file.tensors if t.name == "blk.0.attn_v.weight")
    content = bytearray(tiny.read_bytes())
    content[place : place + 2] = b"\x00\x7e"
    tiny.write_bytes(content)
    assert run(tiny, backend).isnan().any()


def test_a_tied_head_and_one_of_its_own(tmp_path, backend):
    path = tmp_path / "tied.gguf"
    tiny_gguf.write_llama(path, head=False)
    assert load(path, backend=backend).spec.tied_head
    tiny_gguf.write_llama(path, head=True)
    assert not load(path, backend=backend).spec.tied_head


@pytest.mark.parametrize("shards", [2, 3])
def test_split_files_equal_the_whole_one(tmp_path, backend, shards):
    whole = tmp_path / "whole.gguf"
    tensors = tiny_gguf.write_llama(whole)
    writer = tiny_gguf.llama_writer(tmp_path / "part.gguf", split_max_tensors=-(-len(tensors) // shards))
    tiny_gguf.add_byte_vocabulary(writer)
    for name, array in tensors.items():
        tiny_gguf.add(writer, name, array, "Q8_0")
    tiny_gguf.finish(writer)
    parts = sorted(tmp_path.glob("part-*.gguf"))
    assert len(parts) == shards
    for part in parts:  # any part will do
        assert torch.equal(run(part, backend), run(whole, backend))
    parts[-1].rename(tmp_path / "aside")
    refused(parts[0], backend, parts[-1].name, "is missing")
    shutil.copy(parts[0], parts[-1])
    refused(parts[0], backend, f"is not part {shards} of {shards}")
    parts[0].rename(tmp_path / "renamed.gguf")
    refused(tmp_path / "renamed.gguf", backend, "original names")


def test_the_gguf_path_never_imports_transformers(tiny):
    program = (
        "import sys; from model.checkpoint import load; from tests.checkpoint.run_decoder import reference_backend;"
        f"load({str(tiny)!r}, backend=reference_backend()); sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


ABSURD = """
import resource, sys
from model.checkpoint import CheckpointError, load
from tests.checkpoint import tiny_gguf
from tests.checkpoint.run_decoder import reference_backend

path, backend = sys.argv[1], reference_backend()
resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))  # torch's own maps take some of it
tensors, refused = tiny_gguf.llama_tensors(), 0
for key in ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
            "attention.head_count_kv", "attention.key_length", "rope.dimension_count"):
    for value in (0, 1, 3, 1000, 1 << 31, (1 << 32) - 1):
        writer = tiny_gguf.llama_writer(path)
        writer.kv_data[0].pop(f"llama.{key}", None)
        writer.add_uint32(f"llama.{key}", value)
        tiny_gguf.add_byte_vocabulary(writer)
        for name, array in tensors.items():
            tiny_gguf.add(writer, name, array)
        tiny_gguf.finish(writer)
        try:
            load(path, backend=backend)
        except CheckpointError as error:
            assert len(str(error).splitlines()) == 1
            refused += 1
print(refused)
"""


def test_absurd_counts_are_one_sentence_and_do_not_fill_the_memory(tmp_path):
    done = subprocess.run([sys.executable, "-c", ABSURD, str(tmp_path / "a.gguf")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 25
