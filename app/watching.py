"""When a worker counts as hung: silent, too long in one step, or without a sign of life while it loads.

Knows times, and what a process says of itself; ends nothing.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from app.worker_client import WorkerClient

SILENCE_SECONDS = 5.0
STEP_SECONDS = 30.0
STEP_MEDIANS = 20.0
LOADING_SILENCE_SECONDS = 10.0


@dataclass
class Loading:
    """A worker from the start of its process until it is up; it may take minutes, as long as it lives.

    A sign of life is a beat, or that `progress` has changed (what the kernel counted of the process; None where it
    does not say). Either alone would not do: before the worker has connected, and while an import or a copy holds the
    interpreter's lock, nothing beats; while it waits for the compiler, only the beats go on.
    """

    progress: Callable[[], tuple[int, ...] | None]
    last_sign: float = field(default_factory=time.monotonic)
    _seen: tuple[int, ...] | None = None

    def beat(self) -> None:
        """The worker said that it lives; or nobody could have heard it."""
        self.last_sign = time.monotonic()

    def hung(self) -> str:
        """What is wrong with it, or ""; to be asked several times a second."""
        now, seen = time.monotonic(), self.progress()
        if seen is None or seen != self._seen:
            self._seen, self.last_sign = seen, now
        silence = now - self.last_sign
        if silence > LOADING_SILENCE_SECONDS:
            return f"it gave no sign of life for {silence:.1f} s while it loaded"
        return ""


def hung(client: WorkerClient) -> str:
    """What is wrong with a worker that serves, or ""."""
    silence = time.monotonic() - client.last_heard
    if silence > SILENCE_SECONDS:
        return f"it was silent for {silence:.1f} s"
    limit = max(STEP_SECONDS, STEP_MEDIANS * client.median_step_seconds)
    if client.step_seconds > limit:
        return f"its step has lasted {client.step_seconds:.1f} s, the limit is {limit:.1f} s"
    return ""
