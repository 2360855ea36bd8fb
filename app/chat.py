"""A terminal chat with a running server, streaming. A plain HTTP client: it imports nothing of the server.

Knows chat completions and server-sent events as bytes on a connection; does not know what serves them.
"""

import http.client
import json
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

HELP = "/new starts over, /system TEXT sets the system message, /again repeats the last question, /quit leaves"


class ChatError(Exception):
    """The server cannot be reached or refused; the text is one sentence."""


@dataclass(frozen=True)
class Server:
    """A server's address and the key it wants."""

    url: str
    api_key: str = ""

    def open(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> http.client.HTTPResponse:
        """One request; raises ChatError unless the answer is a 200."""
        parts = urllib.parse.urlsplit(self.url if "//" in self.url else f"http://{self.url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ChatError(f"{self.url!r} is no address of a server; write one such as http://127.0.0.1:8000.")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            connection = kind(parts.hostname, parts.port, timeout=600)
            connection.request(method, parts.path.rstrip("/") + path, json.dumps(body) if body else None, headers)
            response = connection.getresponse()
        except OSError as error:
            reason = error.strerror or str(error)
            raise ChatError(f"No server answers at {self.url} ({reason}); start one with `make serve`.") from error
        if response.status != 200:
            raise ChatError(_refusal(response.status, response.read()))
        return response

    def first_model(self) -> str:
        """The name of the first model that the server lists."""
        with self.open("GET", "/v1/models") as response:
            return str(json.load(response)["data"][0]["id"])

    def stream(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed chat completion. Raises ChatError on an error event or a cut."""
        with self.open("POST", "/v1/chat/completions", {**body, "stream": True}) as response:
            try:
                for line in response:
                    if not line.startswith(b"data: "):
                        continue
                    if line.strip() == b"data: [DONE]":
                        return
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise ChatError(event["error"]["message"])
                    yield event
            except (OSError, http.client.HTTPException) as error:
                raise ChatError(f"The stream broke off ({error}).") from error
        raise ChatError("The stream ended without its last event; the server may have gone down.")


def _refusal(status: int, body: bytes) -> str:
    try:
        return f"{json.loads(body)['error']['message']} (HTTP {status})"
    except (ValueError, KeyError, TypeError):
        return f"The server answered {status}."


@dataclass
class Session:
    """One conversation: the server, what is asked of it, and what has been said so far."""

    server: Server
    model: str
    system: str
    wishes: Mapping[str, Any]
    said: list[dict[str, str]] = field(default_factory=list)

    def ask(self, question: str) -> Iterator[str]:
        """The pieces of the answer as they come; the exchange is kept once the answer is whole."""
        self.model = self.model or self.server.first_model()
        asked = [*self.said, {"role": "user", "content": question}]
        system = [{"role": "system", "content": self.system}] if self.system else []
        wishes = {name: value for name, value in self.wishes.items() if value is not None}
        answer = ""
        for event in self.server.stream({"model": self.model, "messages": system + asked, **wishes}):
            for choice in event.get("choices", ()):
                piece = choice["delta"].get("content") or ""
                answer += piece
                if piece:
                    yield piece
        self.said = [*asked, {"role": "assistant", "content": answer}]


def talk(session: Session, once: str = "", console: Console | None = None) -> int:
    """Ask `once` and return, or go on asking until /quit or the end of input. Returns the exit code."""
    console = console or Console()
    if once:
        return _say(session, once, console)
    try:
        session.model = session.model or session.server.first_model()
    except ChatError as error:
        return _complain(error)
    console.print(f"[dim]{session.model} at {session.server.url}; {HELP}[/]", highlight=False)
    question = ""
    while True:
        try:
            line = console.input("[bold cyan]you[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return 0
        command, _, rest = line.partition(" ")
        if command == "/quit":
            return 0
        if command == "/new":
            session.said.clear()
        elif command == "/system":
            session.system = rest
        elif command.startswith("/") and command != "/again":
            console.print(f"[dim]{HELP}[/]", highlight=False)
        elif line:
            if command == "/again":
                del session.said[-2:]
            else:
                question = line
            _say(session, question, console)


def _say(session: Session, question: str, console: Console) -> int:
    """Print one answer as it streams: Markdown on a terminal, plain text elsewhere. Ctrl-C stops the answer."""
    try:
        if not console.is_terminal:
            for piece in session.ask(question):
                console.out(piece, end="", highlight=False)
            console.out("")
            return 0
        answer = ""
        with Live(Text("…", style="dim"), console=console, refresh_per_second=12, vertical_overflow="visible") as live:
            for piece in session.ask(question):
                answer += piece
                live.update(Markdown(answer))
    except ChatError as error:
        return _complain(error)
    except KeyboardInterrupt:
        console.print("[dim]stopped[/]")
    return 0


def _complain(error: ChatError) -> int:
    Console(stderr=True, soft_wrap=True).print(Text.assemble(("error: ", "bold red"), str(error)))
    return 1
