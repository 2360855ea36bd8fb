"""Fixtures of the browser tests: Debian's Chromium through Playwright, the real server, and a scripted stage.

Where Chromium is missing the tests skip and say so; under CI a missing browser is a failure.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.browser.stage import Stage

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]
HARMLESS = ("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_CONNECTION_RESET")


def port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# Not for the whole session: while Playwright's synchronous side is open its event loop counts as running, and no
# asynchronous test of another folder could run.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium for the tests of a module."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        reason = "Chromium is not installed: apt-get install chromium, then run the browser tests again."
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


def wait_until_ready(url: str, process: subprocess.Popen, seconds: float = 120) -> None:
    """Until the server takes requests; fails when it ends or takes too long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            pytest.fail(f"the server ended with code {process.returncode}")
        try:
            urllib.request.urlopen(url + "health/ready", timeout=2)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    pytest.fail(f"the server was not ready after {seconds} s")


@pytest.fixture(scope="module")
def server(default_model: Path) -> Iterator[str]:
    """The real server with the default model; gives its address."""
    number = port()
    command = [sys.executable, "-m", "app", "serve", "--port", str(number), "--model", str(default_model)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{number}/"
    try:
        wait_until_ready(url, process)
        yield url
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture
def stage() -> Iterator[Stage]:
    """The page with scripted answers."""
    play = Stage(port())
    play.start()
    yield play
    play.stop()


@pytest.fixture
def page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A fresh page; the test fails when the console holds an error. Mark `expects_errors` allows failed requests."""
    context = browser.new_context()
    one = context.new_page()
    errors: list[str] = []
    one.on("pageerror", lambda error: errors.append(str(error)))
    one.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    yield one
    context.close()
    if request.node.get_closest_marker("expects_errors"):
        errors = [
            error
            for error in errors
            if "Failed to load resource" not in error and not any(h in error for h in HARMLESS)
        ]
    assert errors == []
