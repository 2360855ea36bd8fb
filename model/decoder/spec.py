"""DecoderSpec: everything that tells one decoder from another, as frozen values whose defaults mean "off".

Knows shapes and choices; imports no torch and names no family. `families/` builds specs, `decoder.py`
builds modules from them. Each field is set by some family and exercised by a parity test.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class NormSpec:
    """`offset` is added to the stored weight at load (1.0 where checkpoints store weight - 1)."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-5
    weight: bool = True
    bias: bool = False
    offset: float = 0.0


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions on the first `dim` entries of each head. Angles are computed in float64.

    `scaling` None, or one of "linear", "dynamic", "yarn", "banded" (piecewise by wavelength), "longrope";
    its numbers stand in the fields below and are resolved once, from the served context: "dynamic" grows the
    base with `served_context` beyond `original_context`; "longrope" has its divisors in `factors`.
    """

    dim: int
    base: float = 10000.0
    layout: Literal["halves", "pairs"] = "halves"
    scaling: Literal["linear", "dynamic", "yarn", "banded", "longrope"] | None = None
    factor: float = 1.0
    original_context: int = 0
    low_factor: float = 1.0
    high_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    factors: tuple[float, ...] = ()
    truncate: bool = True
    served_context: int = 0


@dataclass(frozen=True)
class AttentionSpec:
    """`window`: the layer's trained window (None sees everything). `scale` None is head_dim ** -0.5.

    ALiBi slopes are `alibi_scale` * 2 ** (-alibi_max * i / heads).
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec | None = None
    alibi: bool = False
    alibi_scale: float = 1.0
    alibi_max: float = 8.0
    window: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: NormSpec | None = None
    qk_norm_full_width: bool = False
    clip_qkv: float | None = None
    softcap: float | None = None
    scale: float | None = None
    sink_logits: bool = False


@dataclass(frozen=True)
class MlpSpec:
    """Feed-forward of `width`; gated: act(gate) * up."""

    width: int
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] = "silu"
    gated: bool = False
    bias: bool = False


@dataclass(frozen=True)
class LayerSpec:
    """One block. A norm that is None is not there.

    Sequential: x += post_attention(attention(pre_attention(x))); x += post_mlp(mlp(pre_mlp(x))).
    Parallel: x += attention(pre_attention(x)) + mlp(pre_mlp(x)); pre_mlp None shares pre_attention's output.
    `norm_residual`: the post norms act on the sum: x = post_attention(x + attention(x)), as the first Transformer did.
    """

    attention: AttentionSpec
    mlp: MlpSpec
    pre_attention: NormSpec | None = None
    post_attention: NormSpec | None = None
    pre_mlp: NormSpec | None = None
    post_mlp: NormSpec | None = None
    parallel: bool = False
    norm_residual: bool = False


@dataclass(frozen=True)
class PositionSpec:
    """Positions added to the embedding: a learned table, or sinusoids; row `position + offset` is used."""

    kind: Literal["learned", "sinusoidal"]
    count: int
    offset: int = 0


@dataclass(frozen=True)
class DecoderSpec:
    """A whole decoder. `context` is the trained context in tokens."""

    family: str
    vocabulary: int
    width: int
    context: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec | None = None
    embedding_norm: NormSpec | None = None
    embedding_scale: float = 1.0
    embedding_width: int = 0
    positions: PositionSpec | None = None
    tied_head: bool = False
    head_bias: bool = False
    logit_softcap: float | None = None
    logit_scale: float = 1.0
