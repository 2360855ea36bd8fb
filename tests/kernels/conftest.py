"""Backends for the kernel tests; without a compiler or AVX2 there is nothing to test."""

import pytest

from model.decoder.kernels.cpu.backend import open_backend
from model.decoder.kernels.reference import ReferenceBackend


def _open(dtype):
    backend = open_backend(dtype, 2)
    if backend is None:
        pytest.skip("no CPU kernels on this machine")
    return backend


@pytest.fixture(scope="session")
def exact():
    """Our kernels in float32 mode."""
    return _open("float32")


@pytest.fixture(scope="session")
def served():
    """Our kernels as served: quantised weights, int8 rows, float16 cache."""
    return _open("auto")


@pytest.fixture(scope="session")
def reference():
    """The oracle, in float64."""
    return ReferenceBackend("cpu", "float64")
