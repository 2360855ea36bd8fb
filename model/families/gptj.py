"""GPT-J (and KoGPT): attention and feed-forward side by side after one norm; rotary pairs on part of each head.

Source: the mesh-transformer-jax release (Wang & Komatsuzaki 2021).
"""

from collections.abc import Mapping
from typing import Any

from model.decoder.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec, RopeSpec
from model.families.shared.dense import activation
from model.families.shared.names import with_biases

PREFIX = "transformer."
_LAYER = "transformer.h.{}."
NAMES: Mapping[str, str | None] = {
    "transformer.wte.weight": "embedding",
    **{f"{_LAYER}attn.{part}_proj.weight": f"layers.{{}}.attention.{part}" for part in ("q", "k", "v", "out")},
    _LAYER + "attn.bias": None,  # the causal mask and the angles, which old files stored
    _LAYER + "attn.masked_bias": None,
    _LAYER + "attn.embed_positions": None,
} | with_biases(
    {
        _LAYER + "ln_1": "layers.{}.pre_attention",
        _LAYER + "mlp.fc_in": "layers.{}.mlp.up",
        _LAYER + "mlp.fc_out": "layers.{}.mlp.down",
        "transformer.ln_f": "final_norm",
        "lm_head": "head",
    }
)


def spec(config: Mapping[str, Any], context: int = 0) -> DecoderSpec:
    """The spec for a configuration with its defaults filled in; `context` changes nothing here."""
    width, heads = int(config["n_embd"]), int(config["n_head"])
    norm = NormSpec(kind="layer", eps=float(config["layer_norm_epsilon"]), bias=True)
    dim = int(config.get("rotary_dim") or width // heads)
    layer = LayerSpec(
        attention=AttentionSpec(heads, heads, width // heads, rope=RopeSpec(dim=dim, layout="pairs")),
        mlp=MlpSpec(
            width=int(config.get("n_inner") or 4 * width),
            activation=activation(str(config["activation_function"])),
            bias=True,
        ),
        pre_attention=norm,
        parallel=True,
    )
    return DecoderSpec(
        family="gptj",
        vocabulary=int(config["vocab_size"]),
        width=width,
        context=int(config["n_positions"]),
        layers=(layer,) * int(config["n_layer"]),
        final_norm=norm,
        tied_head=bool(config.get("tie_word_embeddings", False)),
        head_bias=True,
    )
