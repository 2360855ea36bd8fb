"""Tiny random models of every family: the reference implementation's, and ours filled from its weights.

One row a family (or a kind of one). Sizes are odd on purpose, norms and biases random, and weights large enough
that logits differ by more than one between tokens and attention is far from uniform.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor

from model import families
from model.checkpoint.naming import assign
from model.decoder.decoder import Decoder
from model.decoder.kernels import Backend
from model.decoder.spec import DecoderSpec

SERVED = 72  # tokens: the longest prompt of the parity test and its 32 decode steps


@dataclass(frozen=True)
class Row:
    """A family's row: its configuration class and what is set. `logit_scale`: what the reference leaves out."""

    config: str
    fields: Mapping[str, Any]
    logit_scale: float = 1.0
    only_longest: bool = False  # where the reference's frequencies depend on the exact length
    attention: str = "eager"
    unmoved: frozenset[str] = frozenset()  # fields that rightly change nothing in this row


USUAL: dict[str, Any] = {
    "vocab_size": 103,
    "hidden_size": 50,
    "num_attention_heads": 5,
    "num_hidden_layers": 3,
    "intermediate_size": 77,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
GROUPED = USUAL | {"hidden_size": 54, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12}
LOCAL = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 9}
SMALL_GPT: dict[str, Any] = {
    "vocab_size": 103,
    "n_embd": 50,
    "n_head": 5,
    "n_layer": 3,
    "n_positions": 96,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
FALCON = {key: value for key, value in USUAL.items() if key != "intermediate_size"} | {"ffn_hidden_size": 77}
MPT: dict[str, Any] = {"vocab_size": 103, "d_model": 48, "n_heads": 6, "n_layers": 3, "max_seq_len": 96}
OPT = {key: value for key, value in USUAL.items() if key != "intermediate_size"} | {"ffn_dim": 77}


def _rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 20.0, **fields}}


LONGROPE = {"short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.2], "long_factor": [1.0, 1.5, 3.0, 5.0, 8.0, 9.0]}

ROWS: dict[str, Row] = {
    "gpt2": Row("GPT2Config", SMALL_GPT | {"n_inner": 77, "scale_attn_by_inverse_layer_idx": True}),
    "gpt2-unscaled": Row("GPT2Config", SMALL_GPT | {"scale_attn_weights": False, "tie_word_embeddings": False}),
    "opt": Row("OPTConfig", OPT | {"num_attention_heads": 5}),
    "opt-350m": Row("OPTConfig", OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 22}),
    "opt-plain-norms": Row("OPTConfig", OPT | {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    "xglm": Row(
        "XGLMConfig",
        {"vocab_size": 103, "d_model": 50, "ffn_dim": 77, "num_layers": 3, "attention_heads": 5}
        | {"max_position_embeddings": 96, "pad_token_id": 1},
    ),
    "gptj": Row("GPTJConfig", SMALL_GPT | {"n_inner": 77, "rotary_dim": 6}),
    "gpt_neox": Row("GPTNeoXConfig", USUAL | {"rotary_pct": 0.6}),
    "gpt_neox-sequential": Row("GPTNeoXConfig", USUAL | {"use_parallel_residual": False, "attention_bias": False}),
    "llama": Row("LlamaConfig", GROUPED | _rope("default")),
    "llama-biased": Row("LlamaConfig", USUAL | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-linear": Row("LlamaConfig", GROUPED | _rope("linear", factor=3.0)),
    "llama-banded": Row(
        "LlamaConfig",
        GROUPED
        | _rope(
            "llama3", factor=8.0, low_freq_factor=1.5, high_freq_factor=3.0, original_max_position_embeddings=48
        ),
    ),
    "llama-dynamic-inside": Row(
        "LlamaConfig",
        GROUPED | _rope("dynamic", factor=4.0),
        unmoved=frozenset({"RopeSpec.scaling", "RopeSpec.factor"}),  # inside the trained context it is the identity
    ),
    "llama-dynamic-beyond": Row(
        "LlamaConfig", GROUPED | {"max_position_embeddings": 40} | _rope("dynamic", factor=4.0), only_longest=True
    ),
    "smollm3": Row("SmolLM3Config", GROUPED | _rope("default") | {"no_rope_layer_interval": 2}),
    "smollm3-sliding": Row(
        "SmolLM3Config",
        GROUPED
        | _rope("default")
        | {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 9, "attention_bias": True},
    ),
    "mistral": Row("MistralConfig", GROUPED | {"sliding_window": 11}),
    "qwen2": Row("Qwen2Config", GROUPED | {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1}),
    "qwen2-yarn": Row(
        "Qwen2Config",
        GROUPED | _rope("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=4.0, beta_slow=0.5),
    ),
    "qwen2-yarn-smooth": Row(
        "Qwen2Config",
        GROUPED | _rope("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=4.0, truncate=False),
    ),
    "qwen3": Row("Qwen3Config", GROUPED | {"attention_bias": True}),
    "gemma": Row("GemmaConfig", GROUPED | {"hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": Row(
        "Gemma2Config",
        GROUPED
        | LOCAL
        | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0, "query_pre_attn_scalar": 7},
    ),
    "gemma3": Row(
        "Gemma3TextConfig",
        GROUPED
        | LOCAL
        | {"query_pre_attn_scalar": 7}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 900.0, "factor": 3.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 60.0},
            }
        },
    ),
    "falcon-7b": Row("FalconConfig", FALCON),
    "falcon-40b": Row(
        "FalconConfig",
        FALCON
        | {"new_decoder_architecture": True, "hidden_size": 48, "num_attention_heads": 6, "num_kv_heads": 2},
    ),
    "falcon-11b": Row(
        "FalconConfig",
        FALCON
        | {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "bias": True}
        | {"hidden_size": 48, "num_attention_heads": 6, "num_kv_heads": 2, "tie_word_embeddings": False},
    ),
    "falcon-rw": Row(
        "FalconConfig",
        FALCON
        | {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
        | {"hidden_size": 40, "num_attention_heads": 4},
        attention="sdpa",  # the reference's eager path adds the ALiBi penalty twice
    ),
    "mpt": Row("MptConfig", MPT | {"attn_config": {"clip_qkv": 1.5, "softmax_scale": 0.5, "alibi_bias_max": 4}}),
    "mpt-scaled": Row("MptConfig", MPT | {"logit_scale": 0.7}, logit_scale=0.7),
    "bloom": Row(
        "BloomConfig",
        {"vocab_size": 103, "hidden_size": 54, "n_layer": 3, "n_head": 6, "bos_token_id": 0, "eos_token_id": 1},
    ),
    "olmo2": Row("Olmo2Config", GROUPED | {"hidden_size": 72, "rms_norm_eps": 1e-3}),
    "phi3-short": Row(
        "Phi3Config", USUAL | {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 72}
        | {"sliding_window": 30}
        | {"original_max_position_embeddings": 80}
        | _rope("longrope", **LONGROPE),
    ),
    "phi3-long": Row(
        "Phi3Config", USUAL | {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 72}
        | {"original_max_position_embeddings": 40}
        | _rope("longrope", **LONGROPE),
        only_longest=True,
    ),
    "phi4-mini": Row(
        "Phi3Config",
        USUAL
        | {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 72, "tie_word_embeddings": True}
        | {"original_max_position_embeddings": 80, "partial_rotary_factor": 0.5}
        | _rope("longrope", short_factor=[1.0, 1.3, 2.0], long_factor=[1.0, 3.0, 8.0]),
    ),
    "exaone4-global": Row(
        "Exaone4Config",
        GROUPED | {"hidden_size": 72, "sliding_window": None, "layer_types": ["full_attention"] * 3},
    ),
    "exaone4": Row("Exaone4Config", GROUPED | {"hidden_size": 72, "sliding_window": 9, "sliding_window_pattern": 3}),
}  # fmt: skip


@dataclass(frozen=True)
class Tiny:
    """The reference model, our spec for it, and all our parameters by our names."""

    reference: Any
    spec: DecoderSpec
    parameters: Mapping[str, Tensor]
    row: Row = field(repr=False)

    def decoder(self, backend: Backend, spec: DecoderSpec | None = None) -> Decoder:
        """Ours, filled; with a `spec` of another shape, what does not fit is filled with other random numbers."""
        decoder = Decoder(spec or self.spec, backend)
        generator = torch.Generator().manual_seed(5)
        for parameter in decoder.parameters():
            stored = self.parameters.get(parameter.name)
            if stored is None or tuple(stored.shape) != parameter.shape:
                if spec is None:
                    raise AssertionError(f"{parameter.name} {parameter.shape} is not in the reference")
                stored = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
            decoder.fill(parameter.name, stored)
        assert not decoder.missing()
        return decoder

    def logits(self, ids: list[int]) -> Tensor:
        """The reference's logits for a whole sequence, [tokens, vocabulary]."""
        with torch.inference_mode():
            return self.reference(torch.tensor([ids]), use_cache=False).logits[0] * self.row.logit_scale


def build(name: str) -> Tiny:
    """The reference model of a row with random weights, and ours."""
    row = ROWS[name]
    config = getattr(transformers, row.config)(**row.fields)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reference's own deprecations are not ours to fix
        reference = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=row.attention).eval()
    if row.config == "MptConfig":  # the reference knows the slopes' maximum but never passes it on
        slopes = partial(type(reference.transformer).build_mpt_alibi_tensor, reference.transformer)
        reference.transformer.build_mpt_alibi_tensor = partial(slopes, alibi_bias_max=config.attn_config.alibi_bias_max)
    randomise(reference)
    family = families.BY_MODEL_TYPE[config.model_type]
    spec = family.spec(config.to_dict(), SERVED)
    return Tiny(reference, spec, parameters(family, reference.state_dict(), spec), row)


def parameters(family: Any, stored: Mapping[str, Tensor], spec: DecoderSpec) -> dict[str, Tensor]:
    """Our parameters by our names, on the very path by which a checkpoint is loaded."""
    books = assign(stored, family.NAMES, where="tiny", prefix=getattr(family, "PREFIX", ""), tied_head=spec.tied_head)
    reshape = getattr(family, "reshape", lambda name, data, spec: {name: data})
    result: dict[str, Tensor] = {}
    for theirs, ours in books.used.items():
        for name, data in reshape(ours, stored[theirs], spec).items():
            assert name not in result, f"{name} twice"
            result[name] = data
    return result


def randomise(reference: Any) -> None:
    """Matrices by their width and somewhat larger, norms around where they start, biases random."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in reference.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            if parameter.ndim == 2:
                parameter.copy_(noise * 1.7 * min(parameter.shape) ** -0.5)
            elif name.endswith("bias"):
                parameter.copy_(noise * 0.3)
            else:
                parameter.mul_(1.0).add_(noise * 0.3)


def family_of(name: str) -> ModuleType | Any:
    """The family's file for a row."""
    return families.BY_MODEL_TYPE[getattr(transformers, ROWS[name].config).model_type]
