"""The terminal chat against a small server: streaming, memory of the conversation, and errors as sentences."""

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from rich.console import Console

from app.chat import ChatError, Server, Session, talk


def event(**delta: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode() + b"\n\n"


EVENTS = (
    event(role="assistant"),
    event(content="Good "),
    b": waiting\n\n",
    event(content="day"),
    b'data: {"choices": [], "usage": {}}\n\n',
    b"data: [DONE]\n\n",
)


@pytest.fixture
def server() -> Iterator[SimpleNamespace]:
    state = SimpleNamespace(asked=[], keys=[], status=200, events=list(EVENTS))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, b'{"data": [{"id": "tiny"}]}')

        def do_POST(self) -> None:
            state.keys.append(self.headers["Authorization"])
            state.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            body = b'{"error": {"message": "No."}}' if state.status != 200 else b"".join(state.events)
            self.reply(state.status, body)

        def reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{httpd.server_port}"
    yield state
    httpd.shutdown()
    httpd.server_close()
    thread.join()


def session(server: SimpleNamespace, **more: object) -> Session:
    return Session(Server(server.url, "key"), "", "Be brief.", {"temperature": 0.5, "seed": None, **more})


def test_an_answer_streams_and_the_conversation_is_kept(server: SimpleNamespace) -> None:
    talking = session(server)
    assert list(talking.ask("Hello")) == ["Good ", "day"]
    list(talking.ask("Again"))
    assert server.asked[0] == {
        "model": "tiny",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        "temperature": 0.5,
        "stream": True,
    }
    assert [message["content"] for message in server.asked[1]["messages"]] == [
        "Be brief.",
        "Hello",
        "Good day",
        "Again",
    ]
    assert server.keys == ["Bearer key", "Bearer key"]


def test_a_refusal_keeps_the_conversation_as_it_was(server: SimpleNamespace) -> None:
    server.status = 400
    talking = session(server)
    with pytest.raises(ChatError, match=r"^No\. \(HTTP 400\)$"):
        list(talking.ask("Hello"))
    assert talking.said == []


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([event(content="Go"), b'data: {"error": {"message": "The worker is gone."}}\n\n'], "The worker is gone"),
        ([event(content="Go")], "ended without its last event"),
    ],
)
def test_a_broken_stream_is_told(server: SimpleNamespace, events: list[bytes], says: str) -> None:
    server.events = events
    with pytest.raises(ChatError, match=says):
        list(session(server).ask("Hello"))


def test_talk_answers_prints_and_obeys_its_commands(server: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["Hello", "/system Be long.", "/again", "/new", "Bye", "/quit"])
    out = io.StringIO()
    console = Console(file=out, width=300)
    monkeypatch.setattr(console, "input", lambda _prompt: next(lines))
    assert talk(session(server), console=console) == 0
    assert out.getvalue().count("Good day") == 3
    asked = [[message["content"] for message in body["messages"]] for body in server.asked]
    assert asked == [["Be brief.", "Hello"], ["Be long.", "Hello"], ["Be long.", "Bye"]]


@pytest.mark.parametrize("terminal", [True, False])
def test_once_answers_and_leaves(server: SimpleNamespace, terminal: bool) -> None:
    out = io.StringIO()
    assert talk(session(server), "Hello", Console(file=out, force_terminal=terminal, width=100)) == 0
    assert "Good day" in out.getvalue()


def test_no_server_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str], free_port: int) -> None:
    talking = Session(Server(f"http://127.0.0.1:{free_port}"), "", "", {})
    assert talk(talking, "Hello", Console(file=io.StringIO())) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: No server answers at http://127.0.0.1:{free_port} (Connection refused)")
    assert said.count("\n") == 1
