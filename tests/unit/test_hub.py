"""Hub ids against a local server that speaks the part of the hub's HTTP interface that a download uses."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from app import catalog, hub
from app.catalog import CatalogError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model-00001-of-00002.safetensors": b"A" * 3000,
    "model-00002-of-00002.safetensors": b"B" * 2000,
    "model.safetensors.index.json": b"{}",
    "consolidated.safetensors": b"C" * 9000,
    "pytorch_model.bin": b"D" * 9000,
    "README.md": b"# a model",
    "onnx/model.onnx": b"E" * 9000,
}


class HubHandler(BaseHTTPRequestHandler):
    """`/api/models/…` names commit and files, `/…/resolve/…` gives them; `state` records what was asked for."""

    state: SimpleNamespace

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = self.path.split("?")[0]
        self.state.asked.append(path)
        if "/resolve/" in path:
            name = path.split(f"/resolve/{COMMIT}/")[-1]
            body = self.state.files.get(name)
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(body or b"").hexdigest()}"'}
            return self.send(404 if body is None else 200, body or b"", headers)
        if path.startswith("/api/models/someone/small") and self.state.files:
            if path.endswith("/revision/nowhere"):
                return self.send(404, b'{"error": "x"}', {"X-Error-Code": "RevisionNotFound"})
            siblings = [{"rfilename": name} for name in self.state.files]
            listing = [{"type": "file", "path": n, "size": len(b), "oid": "0"} for n, b in self.state.files.items()]
            info = {"id": "someone/small", "modelId": "someone/small", "sha": COMMIT, "siblings": siblings}
            return self.send(200, json.dumps(listing if "/tree/" in path else info).encode(), {})
        code = "GatedRepo" if "gated" in path else "RepoNotFound"
        return self.send(403 if "gated" in path else 404, b'{"error": "x"}', {"X-Error-Code": code})

    def send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture
def imitation() -> Iterator[SimpleNamespace]:
    state = SimpleNamespace(files=dict(FILES), asked=[])
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (HubHandler,), {"state": state}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    state.endpoint = f"http://127.0.0.1:{server.server_port}"
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_hub_model_is_pulled_at_a_pinned_commit(imitation: SimpleNamespace, tmp_path: Path) -> None:
    source = catalog.resolve("someone/small", tmp_path, endpoint=imitation.endpoint)
    assert (source.name, source.revision) == ("small", COMMIT)
    assert sorted(path.name for path in source.path.iterdir()) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert (source.path / "model-00002-of-00002.safetensors").read_bytes() == b"B" * 2000


def test_a_pinned_model_needs_no_network(imitation: SimpleNamespace, tmp_path: Path) -> None:
    first = catalog.resolve("someone/small@main", tmp_path, endpoint=imitation.endpoint)
    imitation.asked.clear()
    assert catalog.resolve("someone/small@main", tmp_path, endpoint=imitation.endpoint) == first
    assert imitation.asked == []


def test_a_refresh_asks_the_hub_again(imitation: SimpleNamespace, tmp_path: Path) -> None:
    hub.fetch("someone/small", tmp_path, endpoint=imitation.endpoint, refresh=False)
    imitation.asked.clear()
    hub.fetch("someone/small", tmp_path, endpoint=imitation.endpoint, refresh=True)
    assert any(path.startswith("/api/models/") for path in imitation.asked)


def test_one_gguf_of_a_repository(imitation: SimpleNamespace, tmp_path: Path) -> None:
    imitation.files = {"small-Q4_0.gguf": b"GGUF" * 9, "small-Q8_0.gguf": b"GGUF" * 18}
    with pytest.raises(CatalogError, match=r"holds 2 \.gguf files; name one, as someone/small/small-Q4_0\.gguf"):
        catalog.resolve("someone/small", tmp_path, endpoint=imitation.endpoint)
    source = catalog.resolve("someone/small/small-Q8_0.gguf", tmp_path, endpoint=imitation.endpoint)
    assert source.path.name == "small-Q8_0.gguf"
    assert source.path.read_bytes() == b"GGUF" * 18


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("someone/nothing", "The hub has no model someone/nothing"),
        ("someone/small@nowhere", "someone/small has no revision 'nowhere'"),
        ("someone/gated", "someone/gated@main is gated; accept its terms"),
        ("someone/small/other.gguf", r"someone/small holds no other\.gguf; it has: config\.json"),
    ],
)
def test_refusals_are_sentences(imitation: SimpleNamespace, tmp_path: Path, model: str, says: str) -> None:
    with pytest.raises(CatalogError, match=says) as caught:
        catalog.resolve(model, tmp_path, endpoint=imitation.endpoint)
    assert "\n" not in str(caught.value)


def test_a_repository_without_weights(imitation: SimpleNamespace, tmp_path: Path) -> None:
    imitation.files = {"README.md": b""}
    with pytest.raises(CatalogError, match="holds no weights that can be served"):
        catalog.resolve("someone/small", tmp_path, endpoint=imitation.endpoint)


def test_a_hub_that_does_not_answer(tmp_path: Path, free_port: int) -> None:
    with pytest.raises(CatalogError, match=r"could not be pulled from the hub .*; check the network") as caught:
        catalog.resolve("someone/small", tmp_path, endpoint=f"http://127.0.0.1:{free_port}")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "hub" / "pins").exists()
