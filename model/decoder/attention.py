"""Attention: projections, query/key norms and the call of the paged kernel. Branches when built, not when run.

x ─ q,k,v ─ clip ─ split ─ norm q, k ─ rotate and store ─ attend ─ out
"""

from model.decoder.alibi import alibi_slopes
from model.decoder.kernels import Ops, X
from model.decoder.linear import Linear
from model.decoder.norm import Norm
from model.decoder.parameters import ParameterTable
from model.decoder.spec import AttentionSpec


class Attention:
    """Parameters `name.q`, `.k`, `.v`, `.out`, where asked `.q_norm`, `.k_norm`, `.sink_logits`, and biases."""

    def __init__(self, table: ParameterTable, name: str, spec: AttentionSpec, width: int, layer: int) -> None:
        inner, kv_inner = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self._spec = spec
        self._layer = layer
        self._widths = (inner, kv_inner, kv_inner)
        self._scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        self._qkv = Linear(table, list(zip(_names(name), self._widths, strict=True)), width, spec.qkv_bias)
        self._out = Linear(table, [(f"{name}.out", width)], inner, spec.out_bias)
        self._q_norm = _head_norm(table, f"{name}.q_norm", spec, spec.heads)
        self._k_norm = _head_norm(table, f"{name}.k_norm", spec, spec.kv_heads)
        self._sink_logits = table.vector(f"{name}.sink_logits", spec.heads) if spec.sink_logits else None
        slopes = alibi_slopes(spec.heads, spec.alibi_max, spec.alibi_scale) if spec.alibi else None
        self._slopes = None if slopes is None else table.place(slopes)

    def forward(self, ops: Ops, x: X, wanted: bool = False) -> X:
        """[tokens, width] → [tokens, width], or [rows, width] where only wanted rows go on."""
        spec = self._spec
        qkv = self._qkv.forward(ops, x)
        if spec.clip_qkv is not None:
            qkv = ops.clip(qkv, spec.clip_qkv)
        q, k, v = ops.split(qkv, self._widths)
        if self._q_norm is not None and self._k_norm is not None:
            q, k = self._q_norm.forward(ops, q), self._k_norm.forward(ops, k)
        q = ops.rotate_and_store(
            q,
            k,
            v,
            layer=self._layer,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            rope=spec.rope,
        )
        mixed = ops.attend(
            q,
            layer=self._layer,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            scale=self._scale,
            window=spec.window,
            softcap=spec.softcap,
            alibi_slopes=self._slopes,
            sink_logits=None if self._sink_logits is None else self._sink_logits.value,
        )
        return self._out.forward(ops, ops.select_rows(mixed) if wanted else mixed)


def _names(name: str) -> tuple[str, str, str]:
    return f"{name}.q", f"{name}.k", f"{name}.v"


def _head_norm(table: ParameterTable, name: str, spec: AttentionSpec, heads: int) -> Norm | None:
    """Over each head with one weight for all heads, or over the full width of all heads."""
    if spec.qk_norm is None:
        return None
    if spec.qk_norm_full_width:
        return Norm(table, name, spec.qk_norm, heads * spec.head_dim)
    return Norm(table, name, spec.qk_norm, spec.head_dim, groups=heads)
