"""Backends for the kernel tests, on each path; without a compiler or AVX2 there is nothing to test."""

import pytest

from model.decoder.kernels.reference import ReferenceBackend
from tests.kernels import paths


@pytest.fixture(params=paths.LEVELS)
def path(request):
    """Each path in turn."""
    return request.param


@pytest.fixture
def exact(path):
    """Our kernels in float32 mode."""
    return paths.backend(path, "float32")


@pytest.fixture
def served(path):
    """Our kernels as served: quantised weights, int8 rows, float16 cache."""
    return paths.backend(path, "auto")


@pytest.fixture(scope="session")
def reference():
    """The oracle, in float64."""
    return ReferenceBackend("cpu", "float64")
