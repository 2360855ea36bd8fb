"""Loading model folders: safetensors whole or in shards, PyTorch .bin without code, configurations of every kind."""

import json
import os
import random
import shutil

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from model.checkpoint import load, read_spec
from tests.checkpoint.refusals import IDS, refused, refused_in_one_line, run
from tests.checkpoint.run_decoder import logits, reference_backend


@pytest.fixture(scope="module")
def backend():
    return reference_backend()


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=[1, 2],
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def folder(tmp_path, llama):
    llama.save_pretrained(tmp_path)
    return tmp_path


def reference(llama):
    with torch.no_grad():
        return llama(torch.tensor([IDS])).logits[0]


def close(found, expected):
    return (found - expected).abs().max() <= 1e-4 * expected.std()


def test_a_single_file(folder, llama, backend):
    loaded = load(folder, backend=backend)
    assert close(logits(loaded.decoder, backend, IDS), reference(llama))
    assert loaded.eos_token_ids == (1, 2)
    assert torch.equal(run(folder / "model.safetensors", backend), run(folder, backend))


def test_shards_with_an_index(tmp_path, llama, backend):
    llama.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert close(run(tmp_path, backend), reference(llama))
    victim = sorted(tmp_path.glob("*.safetensors"))[0]
    aside = victim.rename(tmp_path / "aside")
    refused(tmp_path, backend, victim.name, "cannot be read")
    other = sorted(tmp_path.glob("*.safetensors"))[0]
    shutil.copy(other, victim)
    refused(tmp_path, backend, victim.name)
    aside.rename(victim)
    index = tmp_path / "model.safetensors.index.json"
    for damage in (b"", b"{", b"[]", b'{"weight_map": 3}'):
        index.write_bytes(damage)
        refused(tmp_path, backend, "is not a safetensors index")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types(tmp_path, llama, backend, dtype):
    rounded = {name: tensor.to(dtype) for name, tensor in llama.state_dict().items()}
    save_file(rounded, tmp_path / "model.safetensors")
    llama.config.save_pretrained(tmp_path)
    copy = LlamaForCausalLM(llama.config).eval()
    copy.load_state_dict({name: tensor.float() for name, tensor in rounded.items()})
    assert close(run(tmp_path, backend), reference(copy))


def test_every_truncation_point_of_safetensors(folder, backend):
    file = folder / "model.safetensors"
    for size in [*range(file.stat().st_size - 1, 0, -997), *range(40, -1, -1)]:
        os.truncate(file, size)
        refused(folder, backend, str(file))


def test_a_damaged_safetensors_header(folder, backend):
    file = folder / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name = "model.norm.weight"
    for damage in (
        {"dtype": "F32", "shape": [48], "data_offsets": [0, 1 << 40]},
        {"dtype": "F32", "shape": [-48], "data_offsets": [0, 192]},
        {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 192]},
        {"dtype": "F32", "shape": [48], "data_offsets": [-4, 188]},
        {"dtype": "F8_E4M3", "shape": [48], "data_offsets": [0, 48]},
        {"dtype": "I32", "shape": [47], "data_offsets": [0, 188]},
        {"shape": [48]},
        7,
    ):
        raw = json.dumps(header | {name: damage}).encode()
        file.write_bytes(len(raw).to_bytes(8, "little") + raw + content[8 + length :])
        refused(folder, backend, str(folder))


def test_flipped_bytes_in_a_safetensors_header(folder, backend):
    file = folder / "model.safetensors"
    original = file.read_bytes()
    rng = random.Random(5)
    for _ in range(300):
        damaged = bytearray(original)
        damaged[rng.randrange(8 + int.from_bytes(original[:8], "little"))] ^= 1 << rng.randrange(8)
        file.write_bytes(damaged)
        refused_in_one_line(folder, backend)


def as_bin(folder, llama, **options):
    (folder / "model.safetensors").unlink(missing_ok=True)
    torch.save(llama.state_dict(), folder / "pytorch_model.bin", **options)


@pytest.mark.parametrize("zipped", [True, False])
def test_pytorch_bin(folder, llama, backend, zipped):
    as_bin(folder, llama, _use_new_zipfile_serialization=zipped)
    assert close(run(folder, backend), reference(llama))


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(folder, backend, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Bomb()}, folder / "pytorch_model.bin")
    refused(folder, backend, "cannot be read safely", "safetensors")
    assert not (folder / "exploded").exists()


@pytest.mark.parametrize("content", [b"", b"PK", b"PK\x03\x04" + bytes(64), b"\x80\x02}q\x00.", bytes(200)])
def test_a_damaged_bin(folder, backend, content):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    refused(folder, backend, "pytorch_model.bin" if content != b"\x80\x02}q\x00." else str(folder))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ("{}", "is not known"),
        ('{"model_type": "hyena"}', "'hyena' is not known"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "config"),
        ('{"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}', "quantised with gptq"),
    ],
)
def test_a_config_that_cannot_be_used(folder, backend, config, words):
    if config is None:
        (folder / "config.json").unlink()
    else:
        (folder / "config.json").write_text(config)
    refused(folder, backend, words, str(folder))


def test_a_folder_without_weights_and_no_folder_at_all(folder, backend):
    (folder / "model.safetensors").unlink()
    refused(folder, backend, "holds no weights")
    refused(folder / "absent", backend, "does not exist")


def test_both_spellings_of_rope_scaling_give_one_spec(folder, backend):
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters", None)
    specs = []
    for change in (
        {"rope_theta": 5000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "linear", "factor": 2.0}},
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        specs.append(read_spec(folder))
    assert specs[0] == specs[1]
    rope = specs[0].layers[0].attention.rope
    assert (rope.scaling, rope.factor, rope.base) == ("linear", 2.0, 5000.0)


@pytest.mark.parametrize("key", ["num_hidden_layers", "max_position_embeddings", "num_attention_heads", "hidden_size"])
@pytest.mark.parametrize("value", [0, -1, 1 << 40])
def test_absurd_counts_are_refused(folder, backend, key, value):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    refused(folder, backend, str(folder))
