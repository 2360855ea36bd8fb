import pytest

from model.engine.sampler import Sampler


@pytest.fixture(params=["compiled", "reference"])
def make_sampler(request):
    """Sampler(vocabulary, ...) of either kind."""
    return lambda vocabulary, threads=1: Sampler(vocabulary, threads, compiled=request.param == "compiled")
