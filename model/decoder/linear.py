"""Linear: one product, or several that share their input and stand side by side (q, k and v; gate and up).

Knows names and sizes; how a weight is held and multiplied is the backend's business.
"""

from collections.abc import Sequence

from model.decoder.kernels import Ops, X
from model.decoder.parameters import ParameterTable


class Linear:
    """Parameters `name` (and `name.bias`) for each (name, out_features) of `parts`."""

    def __init__(
        self, table: ParameterTable, parts: Sequence[tuple[str, int]], in_features: int, bias: bool = False
    ) -> None:
        self._weights = [table.matrix(name, out_features, in_features) for name, out_features in parts]
        self._biases = [table.vector(f"{name}.bias", size) if bias else None for name, size in parts]

    def forward(self, ops: Ops, x: X) -> X:
        """[tokens, in_features] → [tokens, sum of out_features]."""
        weights = [weight.value for weight in self._weights]
        return ops.linear(x, weights, [None if bias is None else bias.value for bias in self._biases])
