"""`python -m app`: hands the command line to app.cli."""

import os
import signal
import sys
from types import FrameType


def leave(number: int, _frame: FrameType | None) -> None:
    """A signal before anybody else takes signals in hand ends the process without a traceback.

    Not by an exception: one that strikes inside a callback of the import system is printed there, and is lost.
    """
    os._exit(128 + number)


signal.signal(signal.SIGINT, leave)  # here, since the imports below take most of a second

from app import cli  # noqa: E402  # after the handlers, so that Ctrl-C during this import ends quietly too


def main() -> None:
    """Run one command and leave with its exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(cli.run())


if __name__ == "__main__":
    main()
