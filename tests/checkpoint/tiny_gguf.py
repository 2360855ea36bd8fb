"""Small GGUF files for the tests, written with the `gguf` package."""

import gguf
import numpy as np

VOCABULARY = 96


def add_byte_vocabulary(writer, size=VOCABULARY):
    """A byte-level vocabulary: enough for the file to be whole."""
    tokens = [f"t{number}" for number in range(size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * size)
    writer.add_token_merges(["t 0", "t 1"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(2)


def add(writer, name, array, kind="F32"):
    """One tensor, quantised where it can be: rows that are no multiple of a block stay float32."""
    quantised = kind not in ("F32", "F16") and array.ndim == 2 and array.shape[1] % 32 == 0
    if quantised or kind == "F16":
        wanted = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quantize(array, wanted), raw_dtype=wanted)
    else:
        writer.add_tensor(name, np.ascontiguousarray(array, dtype=np.float32))


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_tensors(layers=2, width=64, heads=4, kv_heads=2, wide=96, vocabulary=VOCABULARY, seed=0, head=True):
    """Random tensors of a Llama file by their GGUF names."""
    random = np.random.default_rng(seed)

    def matrix(rows, columns):
        return random.standard_normal((rows, columns), dtype=np.float32) * 0.1

    kv_width = width // heads * kv_heads
    tensors = {"token_embd.weight": matrix(vocabulary, width), "output_norm.weight": 1 + matrix(1, width)[0]}
    if head:
        tensors["output.weight"] = matrix(vocabulary, width)
    for layer in range(layers):
        tensors |= {
            f"blk.{layer}.attn_norm.weight": 1 + matrix(1, width)[0],
            f"blk.{layer}.attn_q.weight": matrix(width, width),
            f"blk.{layer}.attn_k.weight": matrix(kv_width, width),
            f"blk.{layer}.attn_v.weight": matrix(kv_width, width),
            f"blk.{layer}.attn_output.weight": matrix(width, width),
            f"blk.{layer}.ffn_norm.weight": 1 + matrix(1, width)[0],
            f"blk.{layer}.ffn_gate.weight": matrix(wide, width),
            f"blk.{layer}.ffn_up.weight": matrix(wide, width),
            f"blk.{layer}.ffn_down.weight": matrix(width, wide),
        }
    return tensors


def llama_writer(path, layers=2, width=64, heads=4, kv_heads=2, wide=96, architecture="llama", **options):
    writer = gguf.GGUFWriter(path, architecture, **options)
    writer.add_block_count(layers)
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(wide)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width // heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    return writer


def write_llama(path, kind="Q8_0", tensors=None, architecture="llama", vocabulary=True, **shape):
    """A whole tiny Llama; returns its float tensors."""
    tensors = llama_tensors(**shape) if tensors is None else tensors
    shape.pop("seed", None)
    shape.pop("head", None)
    writer = llama_writer(path, architecture=architecture, **shape)
    if vocabulary:
        add_byte_vocabulary(writer)
    for name, array in tensors.items():
        add(writer, name, array, kind)
    finish(writer)
    return tensors
