"""Records a decoder's forward pass: an `Ops` whose calls note what to compute instead of computing it.

Knows the calls and their order; `fuse.py` joins what can be one op and gives values their buffers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from model.decoder.kernels import Activation
from model.decoder.kernels.cpu.packed import PackedWeight
from model.decoder.spec import NormSpec, RopeSpec


@dataclass(eq=False)
class Value:
    """What an op gives: [tokens, width], or [rows, width] once rows were selected.

    `base` is set on a column range of another value; `offset` is where it starts there.
    """

    width: int
    selected: bool
    base: "Value | None" = None
    offset: int = 0

    @property
    def root(self) -> "Value":
        """The value that has the memory."""
        return self if self.base is None else self.base


@dataclass(eq=False)
class Rotated:
    """Queries on their way to `attend`, which turns them by the rope it finds here."""

    q: Value
    rope: RopeSpec | None


@dataclass(eq=False)
class Node:
    """One op: `fields` by the names of the C struct, tensors where it has pointers."""

    code: str
    ins: list[Value]
    out: Value | None
    fields: dict[str, Any] = field(default_factory=dict)
    parts: list[tuple[PackedWeight, Tensor | None]] = field(default_factory=list)
    rope: RopeSpec | None = None
    residual: Value | None = None
    prologue: str | None = None


class Recorder:
    """Implements `Ops`; `nodes` is the pass in order."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def _note(self, code: str, ins: Sequence[Value], width: int, **fields: Any) -> Value:
        selected = bool(ins) and ins[0].selected
        out = Value(width, selected or code == "select")
        self.nodes.append(
            Node(code, list(ins), out, {key: value for key, value in fields.items() if value is not None})
        )
        return out

    def embed(self, weight: PackedWeight, scale: float) -> Value:
        """Rows of the table."""
        out = self._note("embed", [], weight.in_features, factor=scale)
        self.nodes[-1].parts = [(weight, None)]
        return out

    def add_positions(self, x: Value, table: Tensor, offset: int) -> Value:
        """x + table[position + offset]."""
        return self._note("add_positions", [x], x.width, weight=table, offset=offset)

    def norm(self, x: Value, spec: NormSpec, weight: Tensor | None, bias: Tensor | None, groups: int = 1) -> Value:
        """RMSNorm or LayerNorm of `groups` equal parts."""
        return self._note(
            "norm", [x], x.width, norm_kind=spec.kind, eps=spec.eps, weight=weight, bias=bias, groups=groups
        )

    def linear(self, x: Value, parts: Sequence[PackedWeight], biases: Sequence[Tensor | None]) -> Value:
        """Products side by side."""
        out = self._note("linear", [x], sum(part.out_features for part in parts))
        self.nodes[-1].parts = list(zip(parts, biases, strict=True))
        return out

    def activate(self, x: Value, kind: Activation, gated: bool) -> Value:
        """Activation, gated or not."""
        return self._note("activate", [x], x.width // 2 if gated else x.width, activation=kind, gated=int(gated))

    def add(self, x: Value, y: Value) -> Value:
        """x + y."""
        return self._note("add", [x, y], x.width)

    def scale(self, x: Value, factor: float) -> Value:
        """x * factor."""
        return self._note("scale", [x], x.width, factor=factor)

    def clip(self, x: Value, limit: float) -> Value:
        """x clamped."""
        return self._note("clip", [x], x.width, factor=limit)

    def split(self, x: Value, widths: Sequence[int]) -> list[Value]:
        """Column ranges: no op, only names."""
        starts = [sum(widths[:i]) for i in range(len(widths))]
        root = x.root
        return [Value(width, x.selected, root, x.offset + start) for width, start in zip(widths, starts, strict=True)]

    def rotate_and_store(
        self,
        q: Value,
        k: Value,
        v: Value,
        *,
        layer: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rope: RopeSpec | None,
    ) -> Rotated:
        """Keys and values to the cache; the queries are turned when they are read."""
        fields = {"layer": layer, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        self.nodes.append(Node("store", [q, k, v], None, fields, rope=rope))
        return Rotated(q, rope)

    def attend(
        self,
        q: Rotated,
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
    ) -> Value:
        """Attention over the cache."""
        out = self._note(
            "attend",
            [q.q],
            heads * head_dim,
            layer=layer,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=scale,
            window=window,
            softcap=softcap,
            slopes=alibi_slopes,
            sink_logits=sink_logits,
        )
        self.nodes[-1].rope = q.rope
        return out

    def select_rows(self, x: Value) -> Value:
        """The rows whose logits are wanted."""
        return self._note("select", [x], x.width)

    def softcap(self, x: Value, cap: float) -> Value:
        """cap * tanh(x / cap)."""
        return self._note("softcap", [x], x.width, factor=cap)
