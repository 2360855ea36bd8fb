"""Starts one worker process and hears of its end: command line, private socket, last words.

Knows processes, sockets and text lines; imports nothing heavy, so that a worker can be loading while the front
end still imports its own libraries. Does not know the protocol.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import msgspec
from msgspec.structs import replace

from model.config import EngineConfig

WORKER = (sys.executable, "-m", "model.worker")
UNUSABLE = 3  # the exit code of a worker that says in one sentence why it cannot serve
_PROGRESS = (7, 9, 11, 12)  # minflt, majflt, utime, stime of proc(5), counted from the state
_SECRETS = ("EVERSTREAM_API_KEYS",)


class Launched:
    """A running worker process and the socket on which it will call.

    `exited` is done when the process has ended (its exit code; negative: minus the signal) and its last line
    was read.
    """

    def __init__(self, config: EngineConfig, command: Sequence[str] = WORKER) -> None:
        """Raises OSError when the process or its socket cannot be made."""
        self.folder = Path(tempfile.mkdtemp(prefix="everstream-"))  # mode 0700
        self.lines: deque[str] = deque(maxlen=40)
        self.on_line: Callable[[str], None] | None = None
        self.exited: Future[int] = Future()
        path = self.folder / "worker.sock"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.listener.bind(str(path))
            path.chmod(0o600)
            self.listener.listen(1)
            self.listener.setblocking(False)
            told = replace(config, socket=str(path))
            self.process = subprocess.Popen(
                [*command, msgspec.json.encode(told).decode()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={name: value for name, value in os.environ.items() if name not in _SECRETS},
                start_new_session=True,  # a Ctrl-C in the terminal is the front end's to handle
            )
        except OSError:
            self.close()
            raise
        threading.Thread(target=self._watch, name=f"worker-{self.process.pid}", daemon=True).start()

    def _watch(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for raw in output:
                line = raw.decode(errors="replace").rstrip()
                self.lines.append(line)
                if self.on_line is not None:
                    self.on_line(line)
        self.exited.set_result(self.process.wait())

    def kill(self) -> None:
        """End the process at once, also a stopped one."""
        if self.process.poll() is None:
            self.process.kill()

    def progress(self) -> tuple[int, ...] | None:
        """What the kernel counted of the process: page faults, CPU time. It stands still while the process does.

        None where there is no /proc to tell.
        """
        try:
            text = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return None
        fields = text.rpartition(")")[2].split()
        return tuple(int(fields[place]) for place in _PROGRESS)

    def close(self) -> None:
        """Close the listening socket and remove its folder; the connection made over it lives on."""
        self.listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def last_words(self, code: int) -> str:
        """One sentence about how the process ended."""
        said = next((line for line in reversed(self.lines) if line), "")
        if code == UNUSABLE and said:
            return said
        if code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                how += " (out of memory, or killed by hand)"
        else:
            how = f"ended with exit code {code}"
        return f"the worker {how}" + (f"; its last line was: {said}" if said else "")


def launch_all(configs: Sequence[EngineConfig], command: Sequence[str] = WORKER) -> list[Launched]:
    """Start a worker for each configuration; they load while the caller goes on."""
    return [Launched(config, command) for config in configs]
