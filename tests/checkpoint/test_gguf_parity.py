"""GGUF files of every architecture we read give the logits of transformers.

For the architectures that transformers' own GGUF loader reads, the oracle is that loader, on the same file. The
others are compared with the model that the file was made from; docs/models.md calls them unverified, because the
file then comes from this project's tests and not from llama.cpp.
"""

import math

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from model import families
from model.checkpoint import load
from tests.checkpoint.convert_to_gguf import randomise, write
from tests.checkpoint.run_decoder import logits, reference_backend

IDS = [3, 41, 88, 2, 17, 60, 60, 5, 71, 33, 9, 54, 12, 29, 7, 90, 1, 66, 23, 48]

USUAL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
OWN_HEAD = {"tie_word_embeddings": False}
ROPE = {"rope_dimension_count": 16, "rope_freq_base": 10000.0}
BYTES = {"bos_token_id": 0, "eos_token_id": 1}

# architecture: transformers' class prefix, configuration, feed-forward width, further metadata.
READ_BY_TRANSFORMERS = {
    "llama": ("Llama", USUAL | OWN_HEAD, 96, ROPE),
    "qwen2": ("Qwen2", USUAL, 96, ROPE),
    "qwen3": (
        "Qwen3",
        USUAL | {"head_dim": 128, "tie_word_embeddings": True},
        96,
        ROPE | {"rope_dimension_count": 128},
    ),
    "phi3": ("Phi3", USUAL | OWN_HEAD, 96, ROPE),
    "gemma2": (
        "Gemma2",
        USUAL | {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 8},
        96,
        {"sliding_window": 8, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": (
        "Gemma3",
        USUAL | {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 8, "num_hidden_layers": 7},
        96,
        {"sliding_window": 8, "rope_freq_base": 1e6},
    ),
    "gpt2": (
        "GPT2",
        {"vocab_size": 96, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 1024, **BYTES},
        256,
        {},
    ),
    "bloom": ("Bloom", {"vocab_size": 96, "hidden_size": 64, "n_layer": 3, "n_head": 4, **BYTES}, 256, {}),
    "falcon": (
        "Falcon",
        {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, **BYTES},
        256,
        {"head_count_kv": 1, "rope_freq_base": 10000.0},
    ),
}
UNVERIFIED = {
    "gemma": ("Gemma", USUAL | {"head_dim": 32}, 96, {}),
    "gptneox": (
        "GPTNeoX",
        {k: v for k, v in USUAL.items() if k != "num_key_value_heads"} | OWN_HEAD | {"rotary_pct": 0.25},
        96,
        {"rope_dimension_count": 4, "parallel_residual": True},
    ),
    "mpt": (
        "Mpt",
        {
            "vocab_size": 96,
            "d_model": 64,
            "n_layers": 3,
            "n_heads": 4,
            "expansion_ratio": 4,
            "max_seq_len": 128,
            "attn_config": {"clip_qkv": 0.8},
            **BYTES,
        },
        256,
        {"clamp_kqv": 0.8, "max_alibi_bias": 8.0},
    ),
    "olmo2": ("Olmo2", USUAL | OWN_HEAD, 96, ROPE),
    "smollm3": ("SmolLM3", USUAL | {"num_hidden_layers": 5}, 96, ROPE | {"rope_freq_base": 2e6}),
    "exaone4": (
        "Exaone4",
        USUAL | {"num_hidden_layers": 5, "sliding_window": 8, "sliding_window_pattern": 4},
        96,
        ROPE | {"sliding_window": 8},
    ),
}


@pytest.fixture(scope="module")
def backend():
    return reference_backend()


def build(row):
    """A random model of one row, and what its file says beside the configuration."""
    name, values, wide, extra = row
    prefix = {"Gemma3": "Gemma3Text"}.get(name, name)
    config = getattr(transformers, f"{prefix}Config")(**values)
    model = getattr(transformers, {"GPT2": "GPT2LMHeadModel"}.get(name, f"{name}ForCausalLM"))(config)
    return randomise(model), wide, extra


def transformers_logits(model):
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].float()


def assert_close(found, expected):
    spread = expected.std()
    assert spread > 0.5
    assert (found - expected).abs().max() <= 1e-4 * spread
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("architecture", sorted(READ_BY_TRANSFORMERS))
def test_logits_equal_transformers_gguf_loader(tmp_path, backend, architecture, kind):
    path = tmp_path / "model.gguf"
    model, wide, extra = build(READ_BY_TRANSFORMERS[architecture])
    write(path, model, architecture, wide, kind, **extra)
    found = logits(load(path, backend=backend).decoder, backend, IDS)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    assert_close(found, transformers_logits(oracle.eval()))
    if kind == "F32":
        assert_close(found, transformers_logits(model))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_every_type_equals_transformers_gguf_loader(tmp_path, backend, kind):
    path = tmp_path / "model.gguf"
    model, wide, extra = build(READ_BY_TRANSFORMERS["llama"])
    write(path, model, "llama", wide, kind, **extra)
    found = logits(load(path, backend=backend).decoder, backend, IDS)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    assert_close(found, transformers_logits(oracle.eval()))


@pytest.mark.parametrize("architecture", sorted(UNVERIFIED))
def test_unverified_architectures_equal_the_model_they_were_made_from(tmp_path, backend, architecture):
    path = tmp_path / "model.gguf"
    model, wide, extra = build(UNVERIFIED[architecture])
    write(path, model, architecture, wide, **extra)
    assert_close(logits(load(path, backend=backend).decoder, backend, IDS), transformers_logits(model))


def test_every_gguf_architecture_has_its_row():
    assert set(READ_BY_TRANSFORMERS) | set(UNVERIFIED) == set(families.BY_GGUF_ARCHITECTURE)


def banded_factors(dim, base, factor, low, high, original):
    """The divisors that the converter stores for LLaMA 3.1's scaling (`rope_freqs.weight`), in its own words."""
    factors = []
    for index in range(0, dim, 2):
        wavelength = 2 * math.pi * base ** (index / dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def test_the_scaling_of_llama_3_1_comes_out_of_its_tensor(tmp_path, backend):
    path = tmp_path / "model.gguf"
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    parameters = {"rope_type": "llama3", "rope_theta": 10000.0} | scaling
    model, wide, extra = build(("Llama", USUAL | OWN_HEAD | {"rope_parameters": parameters}, 96, ROPE))
    factors = banded_factors(16, 10000.0, 8.0, 1.0, 4.0, 32)
    assert len(set(factors.tolist())) > 2
    write(path, model, "llama", wide, tensors={"rope_freqs.weight": factors}, **extra)
    loaded = load(path, backend=backend)
    assert loaded.books.dropped.keys() == {"rope_freqs.weight"}
    assert_close(logits(loaded.decoder, backend, IDS), transformers_logits(model))


def test_linear_scaling_comes_out_of_the_metadata(tmp_path, backend):
    path = tmp_path / "model.gguf"
    parameters = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    model, wide, extra = build(("Llama", USUAL | OWN_HEAD | {"rope_parameters": parameters}, 96, ROPE))
    linear = {"rope_scaling_type": gguf.RopeScalingType.LINEAR, "rope_scaling_factor": 4.0}
    write(path, model, "llama", wide, **extra, **linear)
    assert_close(logits(load(path, backend=backend).decoder, backend, IDS), transformers_logits(model))


@pytest.mark.parametrize("original", [64, 8], ids=["short", "long"])
def test_long_context_divisors_come_out_of_their_tensors(tmp_path, backend, original):
    path = tmp_path / "model.gguf"
    short, long = ([1.0 + step * index for index in range(8)] for step in (0.1, 0.7))
    parameters = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": short, "long_factor": long}
    values = USUAL | OWN_HEAD | {"rope_parameters": parameters, "original_max_position_embeddings": original}
    model, wide, extra = build(("Phi3", values, 96, ROPE))
    tensors = {
        "rope_factors_short.weight": np.array(short, np.float32),
        "rope_factors_long.weight": np.array(long, np.float32),
    }
    factor = math.sqrt(1 + math.log(128 / original) / math.log(original))
    stated = {"rope_scaling_orig_ctx_len": original, "rope_scaling_attn_factors": factor}
    write(path, model, "phi3", wide, tensors=tensors, **extra, **stated)
    # transformers chooses by the length of each prompt, this project by the served context: keep both on one side.
    loaded = load(path, backend=backend, context=16 if original == 64 else 128)
    assert_close(logits(loaded.decoder, backend, IDS[:16]), transformers_logits(model)[:16])
