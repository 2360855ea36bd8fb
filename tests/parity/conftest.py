"""Parity tests run toys: products so small that they only lose by being shared between threads."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Torch on one thread for the test, as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
