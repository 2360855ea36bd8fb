"""Decoder: embedding, blocks and head, built from a DecoderSpec and run by a backend.

Knows shapes and the order of things; no family, no checkpoint, no request. `forward` is one straight line
of `Ops` calls, so a backend may run it or record it.

    sequential   x ─┬─ pre_attention ─ attention ─ post_attention ─(+)─┬─ pre_mlp ─ mlp ─ post_mlp ─(+)─
                    └────────────────────────────────────────────────┘ └──────────────────────────────┘
    parallel     x ─┬─ pre_attention ─┬─ attention ─(+)─(+)─      (with pre_mlp the mlp has a norm of its own)
                    │                 └─ mlp ────────┘   │
                    └────────────────────────────────────┘
"""

import math

import torch
from torch import Tensor

from model.decoder.attention import Attention
from model.decoder.inputs import DecoderInput
from model.decoder.kernels import Backend, KVStore, Ops, X
from model.decoder.linear import Linear
from model.decoder.mlp import Mlp
from model.decoder.norm import optional_norm
from model.decoder.parameters import Parameter, ParameterTable
from model.decoder.spec import DecoderSpec, LayerSpec, PositionSpec
from model.decoder.weights import RawWeight


class Block:
    """One layer; see the diagram above. Parameters under `layers.N`."""

    def __init__(self, table: ParameterTable, layer: int, spec: LayerSpec, width: int) -> None:
        name = f"layers.{layer}"
        self._parallel = spec.parallel
        self._norm_residual = spec.norm_residual
        self._pre_attention = optional_norm(table, f"{name}.pre_attention", spec.pre_attention, width)
        self._attention = Attention(table, f"{name}.attention", spec.attention, width, layer)
        self._post_attention = optional_norm(table, f"{name}.post_attention", spec.post_attention, width)
        self._pre_mlp = optional_norm(table, f"{name}.pre_mlp", spec.pre_mlp, width)
        self._mlp = Mlp(table, f"{name}.mlp", spec.mlp, width)
        self._post_mlp = optional_norm(table, f"{name}.post_mlp", spec.post_mlp, width)

    def forward(self, ops: Ops, x: X, last: bool = False) -> X:
        """[tokens, width] → [tokens, width]; the last layer gives [rows, width]: the rows whose logits are wanted."""
        normed = x if self._pre_attention is None else self._pre_attention.forward(ops, x)
        mixed = self._attention.forward(ops, normed, wanted=last)
        if last:  # keys and values of all tokens are stored: only the wanted rows go on
            x = ops.select_rows(x)
        if self._parallel:
            shared = ops.select_rows(normed) if last and self._pre_mlp is None else normed
            inner = shared if self._pre_mlp is None else self._pre_mlp.forward(ops, x)
            return ops.add(ops.add(x, mixed), self._mlp.forward(ops, inner))
        if self._post_attention is not None and not self._norm_residual:
            mixed = self._post_attention.forward(ops, mixed)
        x = ops.add(x, mixed)
        if self._post_attention is not None and self._norm_residual:
            x = self._post_attention.forward(ops, x)
        inner = x if self._pre_mlp is None else self._pre_mlp.forward(ops, x)
        fed = self._mlp.forward(ops, inner)
        if self._post_mlp is not None and not self._norm_residual:
            fed = self._post_mlp.forward(ops, fed)
        x = ops.add(x, fed)
        if self._post_mlp is not None and self._norm_residual:
            x = self._post_mlp.forward(ops, x)
        return x


class Decoder:
    """A whole decoder. `fill` each of `missing()` once, then `run`."""

    def __init__(self, spec: DecoderSpec, backend: Backend) -> None:
        self.spec = spec
        self._backend = backend
        self._table = table = ParameterTable(backend)
        inner = spec.embedding_width or spec.width
        self._embedding = table.matrix("embedding", spec.vocabulary, inner, lookup=True)
        self._project_in = Linear(table, [("embedding.in", spec.width)], inner) if spec.embedding_width else None
        self._positions = _position_table(table, spec)
        self._embedding_norm = optional_norm(table, "embedding_norm", spec.embedding_norm, spec.width)
        self._blocks = [Block(table, layer, part, spec.width) for layer, part in enumerate(spec.layers)]
        self._final_norm = optional_norm(table, "final_norm", spec.final_norm, spec.width)
        self._project_out = Linear(table, [("embedding.out", inner)], spec.width) if spec.embedding_width else None
        self._head = self._embedding if spec.tied_head else table.matrix("head", spec.vocabulary, inner)
        self._head_bias = table.vector("head.bias", spec.vocabulary) if spec.head_bias else None

    def fill(self, name: str, weight: RawWeight | Tensor) -> None:
        """Pack one parameter; see `ParameterTable.fill` for the errors."""
        self._table.fill(name, weight)

    def missing(self) -> tuple[str, ...]:
        """Names of the parameters not filled yet, in the decoder's order."""
        return self._table.missing()

    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters: names, shapes, bytes."""
        return tuple(self._table)

    @property
    def num_bytes(self) -> int:
        """Bytes of all filled parameters as the backend holds them."""
        return sum(parameter.num_bytes for parameter in self._table)

    def run(self, inputs: DecoderInput, store: KVStore) -> Tensor:
        """One step: float32 logits [rows, vocabulary]; keys and values of all its tokens are in `store` afterwards."""
        return self._backend.run(self, inputs, store)

    def forward(self, ops: Ops) -> X:
        """The step as `Ops` calls, the same for every step."""
        spec = self.spec
        x = ops.embed(self._embedding.value, spec.embedding_scale)  # [tokens, embedding_width or width]
        if self._project_in is not None:
            x = self._project_in.forward(ops, x)
        if self._positions is not None and spec.positions is not None:
            x = ops.add_positions(x, self._positions.value, spec.positions.offset)
        if self._embedding_norm is not None:
            x = self._embedding_norm.forward(ops, x)
        for block in self._blocks:
            x = block.forward(ops, x, last=block is self._blocks[-1])  # after the last [rows, width]
        if self._final_norm is not None:
            x = self._final_norm.forward(ops, x)
        if self._project_out is not None:
            x = self._project_out.forward(ops, x)
        bias = None if self._head_bias is None else self._head_bias.value
        logits = ops.linear(x, [self._head.value], [bias])
        if spec.logit_scale != 1.0:
            logits = ops.scale(logits, spec.logit_scale)
        return logits if spec.logit_softcap is None else ops.softcap(logits, spec.logit_softcap)


def _position_table(table: ParameterTable, spec: DecoderSpec) -> Parameter | None:
    """The learned table to be filled, or sinusoids already there; None without either."""
    positions = spec.positions
    if positions is None:
        return None
    rows = positions.count + positions.offset
    if positions.kind == "learned":
        return table.table("positions", rows, spec.width)
    value = table.place(sinusoids(positions, spec.width))
    return Parameter("positions", (rows, spec.width), "table", value=value)


def sinusoids(spec: PositionSpec, width: int) -> Tensor:
    """float64 [count + offset, width]: sines in the first half, cosines in the second.

    Frequencies run from 1 down to 1 / 10000 inclusive (tensor2tensor's variant of Vaswani et al. 2017, 3.5);
    an odd width ends in a zero.
    """
    half = width // 2
    frequencies = torch.exp(torch.arange(half, dtype=torch.float64) * -(math.log(10000.0) / (half - 1)))
    angles = torch.arange(spec.count + spec.offset, dtype=torch.float64).unsqueeze(1) * frequencies
    table = torch.zeros(angles.shape[0], width, dtype=torch.float64)
    table[:, :half], table[:, half : 2 * half] = angles.sin(), angles.cos()
    return table
