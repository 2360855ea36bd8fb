"""Norm: RMSNorm or LayerNorm with the parameters its spec asks for, over a row or over equal groups of it.

Knows which parameters there are; the offset of stored weights was added when they were filled.
"""

from model.decoder.kernels import Ops, X
from model.decoder.parameters import ParameterTable
from model.decoder.spec import NormSpec


class Norm:
    """Over `size` entries; `groups` > 1 norms that many parts of a row apart, with one weight for all."""

    def __init__(self, table: ParameterTable, name: str, spec: NormSpec, size: int, groups: int = 1) -> None:
        self._spec = spec
        self._groups = groups
        self._weight, self._bias = table.norm(name, spec, size)

    def forward(self, ops: Ops, x: X) -> X:
        """[tokens, groups * size] → the same shape."""
        weight = None if self._weight is None else self._weight.value
        bias = None if self._bias is None else self._bias.value
        return ops.norm(x, self._spec, weight, bias, self._groups)


def optional_norm(table: ParameterTable, name: str, spec: NormSpec | None, size: int) -> Norm | None:
    """The norm, or None where the spec has none."""
    return None if spec is None else Norm(table, name, spec, size)
