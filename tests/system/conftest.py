"""Servers for the system tests: `fake_server(behaviour, **settings)` and `real_server(**flags)`, real processes."""

import sys
from contextlib import ExitStack

import pytest

from tests.system.harness import Server, fake_command
from tests.tiny_text import write_tokenizer


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory):
    """A model folder that holds only a tokenizer: ids are bytes."""
    return write_tokenizer(tmp_path_factory.mktemp("byte-model"))


@pytest.fixture
def fake_server(byte_model, tmp_path, unused_tcp_port_factory):
    """Start a server whose worker needs no torch; it ends with the test."""
    with ExitStack() as stack:

        def start(behaviour=None, ready=30.0, env=None, popen=None, **settings):
            port = unused_tcp_port_factory()
            command = fake_command(byte_model, port, settings, behaviour or {})
            server = Server(command, tmp_path, port, ready, env, **(popen or {}))
            return stack.enter_context(server)

        yield start


@pytest.fixture
def real_server(default_model, tmp_path, unused_tcp_port_factory):
    """Start a server on the default model through the command line; it ends with the test."""
    with ExitStack() as stack:

        def start(ready=60.0, env=None, **flags):
            port = unused_tcp_port_factory()
            command = [sys.executable, "-m", "app", "serve", "--model", str(default_model), "--port", str(port)]
            command += [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
            return stack.enter_context(Server(command, tmp_path, port, ready, env))

        yield start
