"""A server of its own process, with a fake or a real worker, and clients that notice everything.

Knows how to start, ask, hurt and end it. Figures come from `/metrics`, process facts from psutil.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[2]
_SAMPLE = re.compile(r"^everstream_([a-z0-9_]+)(\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass
class Answer:
    """What a client saw of one stream: texts as they came, when, and how it ended."""

    status: int = 0
    pieces: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)
    errors: list[dict] = field(default_factory=list)
    comments: int = 0
    usage: dict | None = None
    headers: dict = field(default_factory=dict)
    body: dict | None = None
    done: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def between(self) -> bool:
        """The first token has come, the last has not."""
        return bool(self.pieces) and not self.finish and not self.errors


class Server:
    """One running service. Use as a context manager; leaving it kills whatever is left."""

    def __init__(self, command: list[str], folder: Path, port: int, ready: float = 60.0, env=None, **popen) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        self.log = folder / f"server-{port}.log"
        self._popen = {"env": {**os.environ, **(env or {})}, **popen}
        self._command = command
        self._ready = ready
        self._http = httpx.Client(base_url=self.url, timeout=10, verify=False)  # making a TLS context takes long

    def __enter__(self) -> "Server":
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True, **self._popen
            )
        if self._ready:
            try:
                self.wait_ready(self._ready)
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *_) -> None:
        workers = self.workers()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        self._http.close()
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()

    def wait_ready(self, seconds: float = 60.0) -> float:
        """Seconds until the service is ready; raises when it is not, or has ended."""
        start = time.monotonic()
        while time.monotonic() - start < seconds:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log.read_text()}")
            if self.ready_status() == 200:
                return time.monotonic() - start
            time.sleep(0.02)
        raise AssertionError(f"not ready after {seconds} s:\n{self.log.read_text()}")

    def ready_status(self) -> int:
        """The status of /health/ready; 0 where nothing answers."""
        try:
            return self._http.get("/health/ready").status_code
        except httpx.HTTPError:
            return 0

    def workers(self) -> list[psutil.Process]:
        """The worker processes there are."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children()
            return [p for p in children if any("worker" in part for part in p.cmdline()[1:3])]
        return []

    def memory(self) -> int:
        """Resident bytes of the front end."""
        return psutil.Process(self.process.pid).memory_info().rss

    def metrics(self) -> dict[str, float]:
        """Every sample by its name without the prefix, labels in braces."""
        page = self._http.get("/metrics").text
        return {name + (labels or ""): float(value) for name, labels, value in _SAMPLE.findall(page)}

    async def quiet(self, seconds: float = 10.0) -> dict[str, float]:
        """Wait until no stream is open and no sequence runs or waits; returns the metrics then."""
        names = ("streams_open", "num_requests_running", "num_requests_waiting", "kv_blocks_used")
        end = time.monotonic() + seconds
        while True:
            values = self.metrics()
            if not any(values[name] for name in names):
                return values
            if time.monotonic() > end:
                raise AssertionError(f"still busy: { {name: values[name] for name in names} }")
            await asyncio.sleep(0.05)

    def terminate(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def ends(self, seconds: float = 15.0) -> int:
        """The exit code, when it has ended within `seconds`."""
        return self.process.wait(seconds)


def client(server: Server, **more) -> httpx.AsyncClient:
    """An HTTP client without limits of its own."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
    return httpx.AsyncClient(base_url=server.url, timeout=httpx.Timeout(120.0), limits=limits, verify=False, **more)


async def ask(http: httpx.AsyncClient, answer: Answer | None = None, **body) -> Answer:
    """Stream one completion (or take it whole with stream=False) and note everything."""
    answer = answer or Answer()
    body = {"model": "fake", "stream": True, "temperature": 0, "seed": 7, **body}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        answer.status, answer.headers = response.status_code, dict(response.headers)
        if response.status_code != 200 or not body["stream"]:
            answer.body = json.loads(await response.aread())
            return answer
        async for line in response.aiter_lines():
            _note(answer, line)
    return answer


def _note(answer: Answer, line: str) -> None:
    if line.startswith(":"):
        answer.comments += 1
    elif line == "data: [DONE]":
        answer.done = True
    elif line.startswith("data: "):
        event = json.loads(line[6:])
        if "error" in event:
            answer.errors.append(event["error"])
            return
        answer.usage = event.get("usage") or answer.usage
        for choice in event["choices"]:
            if choice.get("text"):
                answer.pieces.append(choice["text"])
                answer.times.append(time.monotonic())
            if choice.get("finish_reason"):
                answer.finish.append(choice["finish_reason"])


def fake_command(folder: Path, port: int, settings: dict, behaviour: dict) -> list[str]:
    """The command line of a server whose worker is the fake one."""
    flags = {"port": port, **settings}
    front = str(Path(__file__).with_name("front.py"))
    return [sys.executable, front, str(folder), json.dumps(flags), json.dumps(behaviour)]
