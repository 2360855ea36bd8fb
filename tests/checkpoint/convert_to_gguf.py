"""Tiny random models of transformers written as GGUF files, the way llama.cpp's converter writes them.

Names come from the `gguf` package; what the converter does to tensors (rows of q and k turned for Llama, one added
to Gemma's norms, fused q, k, v regrouped, GPT-2's matrices transposed) is written here from its description.
"""

import gguf
import numpy as np
import torch

from tests.checkpoint import tiny_gguf


def randomise(model, seed=0):
    """Weights large enough for logits to spread, norms and biases that are not their neutral values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.ndim == 1 and name.endswith("weight")
            centre = 1.0 if is_norm and float(parameter.mean()) > 0.5 else 0.0
            parameter.copy_(centre + noise * (0.2 if parameter.ndim == 1 else 0.15))
    return model.eval()


def permuted(array, heads):
    """Rows for rotary halves put in the order for pairs."""
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def regrouped(array, heads, kv_heads, head_dim):
    """Per-kv-head [queries, key, value] into all queries, all keys, all values."""
    groups = array.reshape(kv_heads, heads // kv_heads + 2, head_dim, *array.shape[1:])
    parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
    return np.concatenate([part.reshape(-1, *array.shape[1:]) for part in parts])


def changed(architecture, name, array, config):
    """What the converter does to one tensor's values; `name` is transformers' own."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if architecture in ("llama", "smollm3"):
        if "q_proj" in name:
            return permuted(array, heads)
        return permuted(array, kv_heads) if "k_proj" in name else array
    if architecture in ("gemma", "gemma2", "gemma3"):
        return array + 1 if "norm" in name else array
    if architecture == "gpt2":
        return array.T if array.ndim == 2 and (".attn." in name or ".mlp." in name) else array
    if "query_key_value" in name:
        kv_heads = heads
        if architecture == "falcon":
            kv_heads = config.num_kv_heads if config.new_decoder_architecture else 1 if config.multi_query else heads
        return regrouped(array, heads, kv_heads, config.hidden_size // heads)
    return array


def metadata(writer, config, wide, **extra):
    heads = config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", 128))
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(wide)
    writer.add_head_count(heads)
    writer.add_vocab_size(config.vocab_size)
    if (kv_heads := getattr(config, "num_key_value_heads", None)) is not None:
        writer.add_head_count_kv(kv_heads)
    if (head_dim := getattr(config, "head_dim", None)) is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if (eps := getattr(config, "rms_norm_eps", None)) is not None:
        writer.add_layer_norm_rms_eps(eps)
    for key in ("layer_norm_epsilon", "layer_norm_eps"):
        if (eps := getattr(config, key, None)) is not None:
            writer.add_layer_norm_eps(eps)
    for key, value in extra.items():
        getattr(writer, f"add_{key}")(value)


def write(path, model, architecture, wide, kind="F32", tensors=None, **extra):
    """The model as a GGUF file of `architecture`; matrices as `kind` where their rows allow."""
    config = model.config
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture)
    metadata(writer, config, wide, **extra)
    tiny_gguf.add_byte_vocabulary(writer, config.vocab_size)
    writer.add_pad_token_id(0)
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if tied and name in ("lm_head.weight", "embed_out.weight"):
            continue
        plain = name.removeprefix("transformer.") if architecture == "bloom" else name
        ours = names.get_name(plain, try_suffixes=(".weight", ".bias"))
        assert ours is not None, name
        tiny_gguf.add(writer, ours, np.ascontiguousarray(changed(architecture, name, tensor.numpy(), config)), kind)
    for name, array in (tensors or {}).items():
        tiny_gguf.add(writer, name, array)
    tiny_gguf.finish(writer)
