"""Fixtures that every kind of test shares: the default model's file, free ports, short socket paths.

Imports nothing that needs torch, so that tests/unit and tests/http run where torch is not installed.
"""

import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from app import catalog, settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Under nohup or behind `&` of a script, every process that a test starts would be deaf to Ctrl-C, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def model_cache() -> Path:
    """The user's own model cache, so that the default model is pulled once and not once a run."""
    return settings.default_cache()


@pytest.fixture(scope="session")
def default_model(model_cache: Path) -> Path:
    """The default model's .gguf file, pulled through the catalog where it is not in the cache yet."""
    return catalog.resolve(settings.DEFAULT_MODEL, model_cache).path


@pytest.fixture
def free_port() -> int:
    """A TCP port on the loopback address that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A private folder with a short path: Unix socket addresses end at about 100 bytes and tmp_path may be longer."""
    folder = Path(tempfile.mkdtemp(prefix="es-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
