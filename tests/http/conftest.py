"""Servers for the HTTP tests: the whole front end on a real socket, a pretend engine behind it, no torch.

Each server runs in a thread with an event loop of its own; `serve(...)` keeps one a behaviour for the session.
"""

import asyncio
import socket
import threading
from dataclasses import dataclass

import httpx
import pytest
import uvicorn

from app.connections import ConnectionLimits, limited
from app.main import create_app
from app.metrics import Metrics
from app.settings import Settings
from model.config import EngineConfig
from tests.fake_worker import FakePool
from tests.tiny_text import byte_tokenizer


@dataclass
class Served:
    """A running front end: its address, its pool, its metrics, and a client."""

    url: str
    pool: FakePool
    metrics: Metrics
    http: httpx.Client

    def post(self, path, body=None, **more):
        return self.http.post(path, json=body, **more)

    def complete(self, **body):
        """A whole completion, which must succeed."""
        answer = self.post("/v1/completions", {"prompt": "Hi", **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def chat(self, **body):
        """A whole chat answer, which must succeed."""
        answer = self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def open_streams(self):
        return self.metrics.registry.get_sample_value("everstream_streams_open")


class Thread(threading.Thread):
    """The thread one server lives in."""

    def __init__(self, tokenizer, settings, engine, behaviour):
        super().__init__(daemon=True)
        self.made = (tokenizer, settings, engine, behaviour)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.up = threading.Event()

    def run(self):
        asyncio.run(self.serve())

    async def serve(self):
        tokenizer, settings, engine, behaviour = self.made
        self.pool = FakePool(EngineConfig(model="fake", name="fake", socket="", **engine), **behaviour)
        self.metrics = Metrics()
        app = create_app(settings, self.pool, tokenizer, self.metrics, model="fake")
        config = uvicorn.Config(
            app,
            http=limited(ConnectionLimits()),
            log_config=None,
            access_log=False,
            ws="none",
            timeout_graceful_shutdown=1,
        )
        self.server = uvicorn.Server(config)
        steps = asyncio.create_task(self.pool.run())
        asyncio.get_running_loop().call_later(0.01, self.watch)
        await self.server.serve([self.socket])
        steps.cancel()

    def watch(self):
        if self.server.started:
            self.up.set()
        else:
            asyncio.get_running_loop().call_later(0.01, self.watch)

    def stop(self):
        self.server.should_exit = True
        self.join(10)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """Ids are bytes; the template prints the begin token."""
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="session")
def serve(tokenizer):
    """A server whose pretend engine behaves as asked; `using`: another tokenizer, `settings`, `engine`: more flags."""
    running = {}

    def start(using=None, settings=None, engine=None, **behaviour):
        key = repr((id(using), settings, engine, sorted(behaviour.items())))
        if key not in running:
            thread = Thread(using or tokenizer, Settings(**(settings or {})), engine or {}, behaviour)
            thread.start()
            assert thread.up.wait(10)
            url = f"http://127.0.0.1:{thread.socket.getsockname()[1]}"
            client = httpx.Client(base_url=url, timeout=30, verify=False)
            running[key] = (thread, Served(url, thread.pool, thread.metrics, client))
        return running[key][1]

    yield start
    for thread, served in running.values():
        served.http.close()
        thread.stop()


@pytest.fixture(scope="session")
def served(serve):
    """The usual server: letters from a hash of the last ids."""
    return serve()
