"""Compiles the C++ sources of this folder into one shared object, in seconds, and caches it by content.

Knows a compiler and a folder; knows nothing of models. `python -m model.decoder.kernels.cpu.build` is run at
set-up; the worker calls `build` again, which is then a look at the cache. No compiler, or a processor without
AVX2, is no error: the reference backend serves.
"""

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent
CHECKOUT = SOURCES.parents[3]
NEEDED = frozenset({"avx2", "fma", "f16c"})
# -ffp-contract=off: a product and a sum become one instruction only where the source says so, so that every
# row count gives the same bits whatever the compiler unrolls.
FLAGS = ("-O3", "-std=c++20", "-fPIC", "-pthread", "-mavx2", "-mfma", "-mf16c", "-mtune=znver3", "-ffp-contract=off")
STRICT = ("-fno-math-errno", "-Wall", "-Wextra")
SANITIZE = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g")


@dataclass(frozen=True)
class Unavailable(Exception):
    """Why there are no kernels here: a sentence."""

    reason: str

    def __str__(self) -> str:
        return self.reason


def missing_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The instruction sets our kernels need and this processor (or operating system) lacks."""
    if platform.machine() not in ("x86_64", "AMD64") or not cpuinfo.exists():
        return NEEDED
    for line in cpuinfo.read_text().splitlines():
        if line.startswith("flags"):
            return NEEDED - frozenset(line.split(":", 1)[1].split())
    return NEEDED


def find_compiler() -> str:
    """Path of a C++ compiler; raises Unavailable."""
    for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise Unavailable("no C++ compiler was found (install g++ to get the fast kernels)")


def _digest(files: Sequence[Path], flags: Sequence[str]) -> str:
    """Of sources and flags, not of the compiler: an image built with one runs where there is none."""
    digest = hashlib.sha256("\0".join(flags).encode())
    for file in files:
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """Where shared objects are kept: the checkout's build folder, or one of this user's where that is read-only."""
    folder = CHECKOUT / "build" / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass  # a read-only checkout: fall through to a folder of our own
    return Path(tempfile.gettempdir()) / f"everstream-kernels-{os.getuid()}"


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"the kernels did not compile: {' '.join(command)}\n{done.stderr[-4000:]}")


def build(*, sanitize: bool = False) -> Path:
    """Path of the shared object, compiled now unless it is cached; raises Unavailable with the reason."""
    missing = missing_features()
    if missing:
        raise Unavailable(f"this processor lacks {', '.join(sorted(missing))}")
    return compiled("sanitized" if sanitize else "kernels", SANITIZE if sanitize else ())


def compiled(kind: str, more_flags: Sequence[str], more_files: Sequence[Path] = ()) -> Path:
    """The shared object `kind` of these sources, whose flags come after the usual ones; raises Unavailable.

    `more_files` are headers from elsewhere that those flags name: a change in one compiles anew.
    """
    flags = (*FLAGS, *STRICT, *more_flags)
    sources = sorted(SOURCES.glob("*.cpp"))
    name = f"{kind}-{_digest([*sources, *sorted(SOURCES.glob('*.h')), *more_files], flags)}.so"
    built = CHECKOUT / "build" / "kernels" / name
    if built.exists():
        return built
    compiler = find_compiler()
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    target = folder / name
    if target.exists() and target.stat().st_uid == os.getuid():
        return target
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        objects = [str(Path(scratch) / f"{source.stem}.o") for source in sources]
        commands = [
            (compiler, *flags, "-c", str(source), "-o", out) for source, out in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            list(pool.map(_run, commands))
        fresh = Path(scratch) / target.name
        _run((compiler, *flags, "-shared", *objects, "-o", str(fresh)))
        fresh.replace(target)  # atomic: two processes may build at once
    return target


def main() -> int:
    """Build and say in one line what happened; exit code 0 also where there can be no kernels."""
    parser = argparse.ArgumentParser(description="Compile the CPU kernels.")
    parser.add_argument("--sanitize", action="store_true", help="with address and undefined-behaviour checks")
    options = parser.parse_args()
    try:
        print(f"kernels: {build(sanitize=options.sanitize)}")
    except Unavailable as why:
        print(f"kernels: {why}; the torch reference serves instead")
    return 0


if __name__ == "__main__":
    sys.exit(main())
