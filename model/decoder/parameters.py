"""The flat table of a decoder's parameters: our names, their shapes, and whether they are filled.

Knows names, shapes and the backend that packs; not where weights come from. A parameter is packed the
moment it is filled, so loading never holds more than the model plus one tensor.
"""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from model.decoder.dequantise import dequantise_weight
from model.decoder.kernels import Backend
from model.decoder.spec import NormSpec
from model.decoder.weights import RawWeight

_KINDS = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16", "torch.float64": "F32"}


class ParameterError(ValueError):
    """A parameter that does not exist, has another shape, or was filled before."""


@dataclass
class Parameter:
    """One parameter: `value` is None until it is filled, then packed (matrix) or placed (vector, table)."""

    name: str
    shape: tuple[int, ...]
    kind: Literal["matrix", "lookup", "table", "vector"]
    offset: float = 0.0
    value: Any = None
    num_bytes: int = 0


class ParameterTable:
    """Parameters by name, in the order in which the decoder was built."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._parameters: dict[str, Parameter] = {}

    def __iter__(self) -> Any:
        return iter(self._parameters.values())

    def matrix(self, name: str, out_features: int, in_features: int, lookup: bool = False) -> Parameter:
        """A weight for `Ops.linear`, or with `lookup` for `Ops.embed`."""
        return self._add(Parameter(name, (out_features, in_features), "lookup" if lookup else "matrix"))

    def table(self, name: str, rows: int, width: int) -> Parameter:
        """A float table that rows are added from (learned positions)."""
        return self._add(Parameter(name, (rows, width), "table"))

    def vector(self, name: str, size: int, offset: float = 0.0) -> Parameter:
        """A bias, a norm's weight (`offset` is added when it is filled) or other vector."""
        return self._add(Parameter(name, (size,), "vector", offset))

    def norm(self, name: str, spec: NormSpec, size: int) -> tuple[Parameter | None, Parameter | None]:
        """Weight and bias of a norm, None where it has none."""
        weight = self.vector(name, size, spec.offset) if spec.weight else None
        return weight, self.vector(f"{name}.bias", size) if spec.bias else None

    def place(self, tensor: Tensor) -> Tensor:
        """A constant (slopes, sinusoids) where the backend reads it."""
        return self._backend.place(tensor)

    def fill(self, name: str, weight: RawWeight | Tensor) -> None:
        """Fill one parameter. Raises ParameterError for an unknown name, a wrong shape, or a second filling."""
        parameter = self._parameters.get(name)
        if parameter is None:
            raise ParameterError(f"this decoder has no parameter {name!r}")
        if parameter.value is not None:
            raise ParameterError(f"parameter {name!r} is filled twice")
        shape = (weight.out_features, weight.in_features) if isinstance(weight, RawWeight) else tuple(weight.shape)
        if shape != parameter.shape and shape != (1, *parameter.shape):
            raise ParameterError(f"parameter {name!r} has shape {parameter.shape}, the checkpoint's has {shape}")
        if parameter.kind in ("matrix", "lookup"):
            parameter.value = self._backend.pack(_raw(weight), lookup=parameter.kind == "lookup")
            parameter.num_bytes = parameter.value.num_bytes
        else:
            tensor = dequantise_weight(weight) if isinstance(weight, RawWeight) else weight
            tensor = tensor.reshape(parameter.shape)
            parameter.value = self._backend.place(tensor + parameter.offset if parameter.offset else tensor)
            parameter.num_bytes = parameter.value.numel() * parameter.value.element_size()

    def missing(self) -> tuple[str, ...]:
        """Names of the parameters that are not filled yet."""
        return tuple(parameter.name for parameter in self if parameter.value is None)

    def _add(self, parameter: Parameter) -> Parameter:
        if parameter.name in self._parameters:
            raise ParameterError(f"parameter {parameter.name!r} is declared twice")
        self._parameters[parameter.name] = parameter
        return parameter


def _raw(weight: RawWeight | Tensor) -> RawWeight:
    if isinstance(weight, RawWeight):
        return weight
    return RawWeight(_KINDS[str(weight.dtype)], weight, weight.shape[0], weight.shape[1])
