"""OPT: learned positions from row 2 on, ReLU; the 350M model norms its residual and has a narrow embedding.

Source: arXiv:2205.01068.
"""

from collections.abc import Mapping
from typing import Any

from model.decoder.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec, PositionSpec
from model.families.shared.dense import activation
from model.families.shared.names import with_biases

PREFIX = "model."
_LAYER = "model.decoder.layers.{}."
NAMES: Mapping[str, str | None] = {
    "model.decoder.embed_tokens.weight": "embedding",
    "model.decoder.embed_positions.weight": "positions",
    "model.decoder.project_in.weight": "embedding.in",
    "model.decoder.project_out.weight": "embedding.out",
    "lm_head.weight": "head",
} | with_biases(
    {
        "model.decoder.final_layer_norm": "final_norm",
        **{f"{_LAYER}self_attn.{part}_proj": f"layers.{{}}.attention.{part}" for part in ("q", "k", "v", "out")},
        _LAYER + "self_attn_layer_norm": "layers.{}.norm_1",
        _LAYER + "final_layer_norm": "layers.{}.norm_2",
        _LAYER + "fc1": "layers.{}.mlp.up",
        _LAYER + "fc2": "layers.{}.mlp.down",
    }
)

_OFFSET = 2  # rows of the table before position 0


def spec(config: Mapping[str, Any], context: int = 0) -> DecoderSpec:
    """The spec for a configuration with its defaults filled in. Learned positions end where the table does."""
    width, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    bias = bool(config.get("enable_bias", True))
    affine = bool(config.get("layer_norm_elementwise_affine", True))
    before = bool(config.get("do_layer_norm_before", True))
    norm = NormSpec(kind="layer", weight=affine, bias=affine)
    layer = LayerSpec(
        attention=AttentionSpec(heads, heads, width // heads, qkv_bias=bias, out_bias=bias),
        mlp=MlpSpec(int(config["ffn_dim"]), activation(str(config["activation_function"])), bias=bias),
        pre_attention=norm if before else None,
        post_attention=None if before else norm,
        pre_mlp=norm if before else None,
        post_mlp=None if before else norm,
        norm_residual=not before,
    )
    narrow = int(config.get("word_embed_proj_dim") or width)
    ends_normed = before and not config.get("_remove_final_layer_norm", False)
    return DecoderSpec(
        family="opt",
        vocabulary=int(config["vocab_size"]),
        width=width,
        context=int(config["max_position_embeddings"]),
        layers=(layer,) * int(config["num_hidden_layers"]),
        final_norm=norm if ends_normed else None,
        embedding_width=narrow if narrow != width else 0,
        positions=PositionSpec("learned", count=int(config["max_position_embeddings"]), offset=_OFFSET),
        tied_head=bool(config.get("tie_word_embeddings", True)),
    )


def reshape(name: str, data: Any, spec: DecoderSpec) -> Mapping[str, Any]:
    """A layer's two norms stand before or after, as the spec has it."""
    place = "post" if spec.layers[0].norm_residual else "pre"
    return {name.replace("norm_1", f"{place}_attention").replace("norm_2", f"{place}_mlp"): data}
