"""The seam between the decoder and the arithmetic: what a backend must offer.

The decoder's forward pass is written once against `Ops`. A backend may run each call at once on tensors
(`reference.py`: torch, any device, the oracle) or record the calls into a tape that one C call replays
(`cpu/`). So a call's arguments must not depend on a step: branching happens when a block is built.
`X` is whatever the backend passes between ops: a tensor [tokens, width], or a buffer's number.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from model.decoder.inputs import DecoderInput
from model.decoder.spec import DecoderSpec, NormSpec, RopeSpec
from model.decoder.weights import RawWeight

X = Any
Packed = Any
Activation = str  # "relu" | "gelu" (erf) | "gelu_tanh" | "silu"


class Ops(Protocol):
    """One step's arithmetic. Every op is row-wise: a row's result depends on that row (and its sequence) only."""

    def embed(self, weight: Packed, scale: float) -> X:
        """Rows of the embedding table for the step's ids, times `scale`: [tokens, width]."""

    def add_positions(self, x: X, table: Tensor, offset: int) -> X:
        """x + table[position + offset], for learned and sinusoidal positions."""

    def norm(self, x: X, spec: NormSpec, weight: Tensor | None, bias: Tensor | None, groups: int = 1) -> X:
        """RMSNorm or LayerNorm over the last axis, split into `groups` equal parts normed apart (qk-norm per head)."""

    def linear(self, x: X, parts: Sequence[Packed], biases: Sequence[Tensor | None]) -> X:
        """x @ weight.T + bias for each part, side by side: [tokens, sum of out_features]."""

    def activate(self, x: X, kind: Activation, gated: bool) -> X:
        """Activation; gated: x holds [gate | up] and the result is act(gate) * up, half as wide."""

    def add(self, x: X, y: X) -> X:
        """x + y."""

    def scale(self, x: X, factor: float) -> X:
        """x * factor."""

    def clip(self, x: X, limit: float) -> X:
        """x clamped to [-limit, limit]."""

    def split(self, x: X, widths: Sequence[int]) -> Sequence[X]:
        """Column ranges of x, in order (views where the backend can)."""

    def rotate_and_store(
        self, q: X, k: X, v: X, *, layer: int, heads: int, kv_heads: int, head_dim: int, rope: RopeSpec | None
    ) -> X:
        """Rotate k at its true position and write k, v into the cache slots of `layer`; rotate q at its position
        p and, for sequences under retention, also at min(p, sinks + window - 1). Returns the queries for `attend`."""

    def attend(
        self,
        q: X,
        *,
        layer: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None,
        softcap: float | None,
        alibi_slopes: Tensor | None,
        sink_logits: Tensor | None,
    ) -> X:
        """Causal attention over the paged cache of `layer`: [tokens, heads * head_dim].

        `window` is the layer's own trained window (None: all). A sequence's retention (its sinks and window in
        DecoderInput) narrows the layer where its window is smaller than the layer's; then, and only then, its
        sinks apply. `alibi_slopes` [heads] adds -slope * distance, the distance to a sink key being virtual.
        `softcap` c: c * tanh(score / c). `sink_logits` [heads]: an extra column in the softmax (unused so far).
        """

    def select_rows(self, x: X) -> X:
        """The rows named by DecoderInput.logit_rows: [rows, width]."""

    def softcap(self, x: X, cap: float) -> X:
        """cap * tanh(x / cap)."""


class Backend(Protocol):
    """Packs weights, owns the layout of the cache, runs steps. `name` is shown in the banner ("cpu avx2", "torch").

    `lasting_rows`: the caller is done with a step's logits before the next step, so steps of at most so many rows may
    all write into the same memory; 0 gives every step its own.
    """

    name: str
    lasting_rows: int

    def pack(self, weight: RawWeight, lookup: bool = False) -> Packed:
        """A weight in the form this backend computes with; the raw one may be dropped afterwards.

        `lookup`: it serves `embed` (and, where the head is tied to it, `linear` too); all others serve `linear`.
        The result has `out_features`, `in_features` and `num_bytes`.
        """

    def place(self, tensor: Tensor) -> Tensor:
        """A vector or position table (norm weight, bias, slopes) in the type and place this backend reads it."""

    def new_kv_store(self, spec: DecoderSpec, num_blocks: int, block_size: int) -> "KVStore":
        """An empty cache. Its dtype is the backend's own choice (float32 in float32 mode)."""

    def run(self, decoder: "Forward", inputs: DecoderInput, store: "KVStore") -> Tensor:
        """One step: float32 logits [rows, vocabulary] on the CPU or the device."""


class KVStore(Protocol):
    """Keys and values of all layers, block by block."""

    num_bytes: int

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block in all layers (the partial last block of a prompt that several choices share)."""


class Forward(Protocol):
    """What a backend runs: the decoder."""

    spec: DecoderSpec

    def forward(self, ops: Ops) -> X:
        """The forward pass, written once against Ops; returns logits for the selected rows."""


def kv_bytes_per_token(spec: DecoderSpec, element_bytes: int) -> int:
    """Bytes of cache that one token takes over all layers."""
    return sum(2 * layer.attention.kv_heads * layer.attention.head_dim for layer in spec.layers) * element_bytes
