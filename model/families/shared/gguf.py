"""GGUF metadata under the usual configuration keys.

Knows the metadata's key names, which are one set for all architectures ("llama.block_count", …). Beside the
file's own keys it reads `vocab_size`, `tensor_names` and `tensor_values` (small tensors that are configuration:
"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"), which the reader of the file adds.
"""

from collections.abc import Mapping
from typing import Any

_KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "sliding_window": "attention.sliding_window",
    "rope_theta": "rope.freq_base",
}


def usual_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata as a configuration with the usual keys; a key the file lacks is left out."""
    architecture = metadata["general.architecture"]
    config = {
        key: metadata[f"{architecture}.{name}"] for key, name in _KEYS.items() if f"{architecture}.{name}" in metadata
    }
    config["model_type"] = architecture
    config["vocab_size"] = metadata["vocab_size"]
    config["tie_word_embeddings"] = "output.weight" not in metadata["tensor_names"]
    config["attention_bias"] = "blk.0.attn_q.bias" in metadata["tensor_names"]
    scaling = _scaling(metadata, f"{architecture}.rope.scaling", config)
    if scaling:
        config["rope_scaling"] = scaling
    rotary = metadata.get(f"{architecture}.rope.dimension_count")
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if rotary is not None and rotary != width:
        config["partial_rotary_factor"] = rotary / width
    return config


def _scaling(metadata: Mapping[str, Any], prefix: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope scaling, if any. Divisors for each pair stand in tensors: long and short ones, or one set."""
    values: Mapping[str, Any] = metadata.get("tensor_values", {})
    original = metadata.get(f"{prefix}.original_context_length")
    if "rope_freqs.weight" in values:
        factors = values["rope_freqs.weight"]
        return {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
    if "rope_factors_long.weight" in values:
        return {
            "rope_type": "longrope",
            "long_factor": values["rope_factors_long.weight"],
            "short_factor": values["rope_factors_short.weight"],
            "attention_factor": metadata.get(f"{prefix}.attn_factor"),
            "original_max_position_embeddings": original,
        }
    kind = metadata.get(f"{prefix}.type", "none")
    if kind == "none":
        return {}
    given = {"rope_type": kind, "factor": metadata.get(f"{prefix}.factor", 1.0)}
    return given if original is None else given | {"original_max_position_embeddings": original}
