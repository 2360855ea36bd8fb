"""Name tables that several families share: the usual names in folders, and GGUF's, which are one set for all.

A pattern's {} is the layer's number; None means dropped on purpose.
"""

from collections.abc import Mapping

_LAYER = "model.layers.{}."

# Where most folders keep their tensors; norms differ and stand in the families' files.
USUAL_NAMES: dict[str, str | None] = {
    "model.embed_tokens.weight": "embedding",
    "model.norm.weight": "final_norm",
    "lm_head.weight": "head",
    _LAYER + "self_attn.rotary_emb.inv_freq": None,
    **{f"{_LAYER}self_attn.{part}_proj.weight": f"layers.{{}}.attention.{part}" for part in "qkv"},
    **{f"{_LAYER}self_attn.{part}_proj.bias": f"layers.{{}}.attention.{part}.bias" for part in "qkv"},
    _LAYER + "self_attn.o_proj.weight": "layers.{}.attention.out",
    _LAYER + "self_attn.o_proj.bias": "layers.{}.attention.out.bias",
    **{f"{_LAYER}mlp.{part}_proj.weight": f"layers.{{}}.mlp.{part}" for part in ("gate", "up", "down")},
    **{f"{_LAYER}mlp.{part}_proj.bias": f"layers.{{}}.mlp.{part}.bias" for part in ("gate", "up", "down")},
}

# The two norms of the common pre-norm block.
PRE_NORMS: dict[str, str | None] = {
    _LAYER + "input_layernorm.weight": "layers.{}.pre_attention",
    _LAYER + "post_attention_layernorm.weight": "layers.{}.pre_mlp",
}

# The two norms of a block that norms what it adds.
POST_NORMS: dict[str, str | None] = {
    _LAYER + "post_attention_layernorm.weight": "layers.{}.post_attention",
    _LAYER + "post_feedforward_layernorm.weight": "layers.{}.post_mlp",
}

HEAD_NORMS: dict[str, str | None] = {
    _LAYER + "self_attn.q_norm.weight": "layers.{}.attention.q_norm",
    _LAYER + "self_attn.k_norm.weight": "layers.{}.attention.k_norm",
}

# GGUF's names without ".weight" / ".bias". `attention.qkv` and `mlp.gate_up` are fused and cut by the family.
_GGUF = {
    "token_embd": "embedding",
    "token_embd_norm": "embedding_norm",
    "position_embd": "positions",
    "output": "head",
    "output_norm": "final_norm",
    "blk.{}.attn_norm": "layers.{}.pre_attention",
    "blk.{}.ffn_norm": "layers.{}.pre_mlp",
    "blk.{}.post_attention_norm": "layers.{}.post_attention",
    "blk.{}.post_ffw_norm": "layers.{}.post_mlp",
    "blk.{}.attn_q": "layers.{}.attention.q",
    "blk.{}.attn_k": "layers.{}.attention.k",
    "blk.{}.attn_v": "layers.{}.attention.v",
    "blk.{}.attn_qkv": "layers.{}.attention.qkv",
    "blk.{}.attn_output": "layers.{}.attention.out",
    "blk.{}.attn_q_norm": "layers.{}.attention.q_norm",
    "blk.{}.attn_k_norm": "layers.{}.attention.k_norm",
    "blk.{}.ffn_gate": "layers.{}.mlp.gate",
    "blk.{}.ffn_up": "layers.{}.mlp.up",
    "blk.{}.ffn_down": "layers.{}.mlp.down",
}


_FREQUENCIES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def gguf_names(**changes: str) -> Mapping[str, str | None]:
    """GGUF's table with weights and biases; `changes` give other places to names of a layer (ffn_up="mlp.gate_up")."""
    table = _GGUF | {f"blk.{{}}.{name}": f"layers.{{}}.{ours}" for name, ours in changes.items()}
    # Frequencies stand in the file as a tensor; they are read as configuration.
    names: dict[str, str | None] = dict.fromkeys(_FREQUENCIES)
    return names | with_biases(table)


def with_biases(table: Mapping[str, str]) -> dict[str, str | None]:
    """Each name and place without its ending, once for ".weight" and once for ".bias"."""
    names: dict[str, str | None] = {}
    for name, ours in table.items():
        names[f"{name}.weight"] = ours
        names[f"{name}.bias"] = f"{ours}.bias"
    return names
