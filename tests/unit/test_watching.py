"""What counts as a sign of life while a worker loads, and what the kernel says of a process."""

import os
import signal
import sys
import time

import pytest

from app import watching
from app.process import Launched
from app.watching import LOADING_SILENCE_SECONDS, Loading
from model.config import EngineConfig


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is told."""
    now = [1000.0]
    monkeypatch.setattr(watching.time, "monotonic", lambda: now[0])
    return now


def loading(progress):
    return Loading(lambda: progress[0], last_sign=1000.0)


def test_either_sign_is_enough(clock):
    progress = [(1, 2)]
    load = loading(progress)
    for number in range(20):
        clock[0] += LOADING_SILENCE_SECONDS - 1
        if number % 2:
            load.beat()
        else:
            progress[0] = (1, 3 + number)
        assert not load.hung()


def test_without_any_it_hangs(clock):
    load = loading([(1, 2)])
    assert not load.hung()
    clock[0] += LOADING_SILENCE_SECONDS
    assert not load.hung()
    clock[0] += 0.5
    assert load.hung() == "it gave no sign of life for 10.5 s while it loaded"


def test_where_the_kernel_tells_nothing_nobody_is_called_hung(clock):
    load = loading([None])
    clock[0] += 600
    assert not load.hung()


def test_progress_stands_still_with_the_process():
    busy = "import os\nwhile True: bytearray(1 << 20)"
    launched = Launched(EngineConfig(model="m", name="a name) with a bracket", socket=""), (sys.executable, "-c", busy))
    try:
        before = launched.progress()
        deadline = time.monotonic() + 10
        while launched.progress() == before:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(launched.process.pid, signal.SIGSTOP)
        time.sleep(0.2)
        before = launched.progress()
        time.sleep(0.3)
        assert launched.progress() == before
    finally:
        launched.kill()
        launched.exited.result(10)
        launched.close()
    assert launched.progress() is None
