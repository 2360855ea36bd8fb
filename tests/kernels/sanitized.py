"""Runs kernel tests on kernels built with address and undefined-behaviour checks: `python -m tests.kernels.sanitized`.

Not a test itself (it needs the compiler's runtime preloaded, so it starts Python again). The first finding ends the
run with the checker's report. Arguments go to pytest; without any it runs all of tests/kernels.
"""

import os
import subprocess
import sys

import pytest

from model.decoder.kernels.cpu import build, library
from tests.kernels import paths


def runtime(name: str) -> str:
    """Path of one of the compiler's runtime libraries."""
    done = subprocess.run(
        [build.find_compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def main() -> int:
    """Preload the checkers, then run pytest with every load going to the checked object."""
    if "LD_PRELOAD" not in os.environ:
        path = build.build(sanitize=True)
        checks = {
            "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libubsan.so')} {runtime('libstdc++.so')}",
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        }
        command = [sys.executable, "-m", "tests.kernels.sanitized", *sys.argv[1:]]
        print(f"checked: {path}", flush=True)
        return subprocess.run(command, env=os.environ | checks, check=False).returncode
    checked = build.build(sanitize=True)
    library.build = lambda: checked  # type: ignore[assignment]  # every load in this process takes it
    paths.EMULATION_FLAGS = build.SANITIZE
    return int(pytest.main(sys.argv[1:] or ["tests/kernels", "-q", "-W", "error"]))


if __name__ == "__main__":
    sys.exit(main())
