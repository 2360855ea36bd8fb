"""Mlp: the dense feed-forward, plain (act(up)) or gated (act(gate) * up, Shazeer 2020, arXiv:2002.05202).

Knows its three parameters; nothing of the block around it.
"""

from model.decoder.kernels import Ops, X
from model.decoder.linear import Linear
from model.decoder.parameters import ParameterTable
from model.decoder.spec import MlpSpec


class Mlp:
    """Parameters `name.gate` (gated only), `name.up`, `name.down`."""

    def __init__(self, table: ParameterTable, name: str, spec: MlpSpec, width: int) -> None:
        inner = ("gate", "up") if spec.gated else ("up",)
        self._spec = spec
        self._up = Linear(table, [(f"{name}.{part}", spec.width) for part in inner], width, spec.bias)
        self._down = Linear(table, [(f"{name}.down", width)], spec.width, spec.bias)

    def forward(self, ops: Ops, x: X) -> X:
        """[tokens, width] → [tokens, width]."""
        inner = ops.activate(self._up.forward(ops, x), self._spec.activation, self._spec.gated)
        return self._down.forward(ops, inner)
