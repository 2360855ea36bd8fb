"""The one layer around all routes: request ids, keys, body limits, disconnects, access log, HTTP counts.

Plain ASGI, so that nothing is added to the cost of an event. A body is read whole before the route runs, within
size and time limits; from then on a client that goes away cancels the route at once, streamed or not.
"""

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

from structlog.contextvars import bind_contextvars, clear_contextvars

from app.security import Keys

log = logging.getLogger("everstream.http")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")
_KNOWN_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_BODILESS = frozenset(("GET", "HEAD", "OPTIONS", "TRACE", "CONNECT"))
_LENGTH = re.compile(rb"[0-9]{1,19}")
_CLIENT_GONE = 499
_CLIENT_LEFT = "client_left"


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes and seconds. `total_body_bytes` bounds the bodies of all requests that are being read."""

    max_body_bytes: int = 16 << 20
    total_body_bytes: int = 256 << 20
    body_timeout: float = 30.0
    protect_health: bool = False
    protect_metrics: bool = False

    def guards(self, path: str) -> bool:
        """Whether a path is answered only to those who show a key, where there are keys."""
        if path.startswith("/health"):
            return self.protect_health
        return self.protect_metrics if path == "/metrics" else not _is_page(path)


class HttpCounter(Protocol):
    """Whoever counts HTTP requests."""

    def http_request(self, route: str, method: str, status: int) -> None: ...


class _Turned(Exception):
    """The request is answered here: status, code, sentence."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class _Gone(Exception):
    """The client went away before its request was whole."""


class Gate:
    """Wraps the application; see the module's text."""

    def __init__(self, app: App, keys: Keys, limits: Limits, counter: HttpCounter) -> None:
        self._app = app
        self._keys = keys
        self._limits = limits
        self._counter = counter
        self._body_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection event; only HTTP passes, a WebSocket is refused by the routes below."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        clear_contextvars()
        bind_contextvars(request_id=request_id)
        state = scope.setdefault("state", {})
        state["request_id"], state["salt"] = request_id, ""
        state["send"] = send  # for bodies of many pieces, which nobody on the way looks at, as is "chunks"
        state["traceparent"] = headers.get(b"traceparent", b"").decode("latin-1")
        status = 0
        # HEAD is GET without the body: the routes below see a GET, and what they send ends with its head.
        inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                await send(message)
                if inner is not scope:
                    await send({"type": "http.response.body", "body": b""})
            elif inner is scope:
                await send(message)

        try:
            self._authorise(scope, headers, state)
            self._check_body(scope, headers)
            body = await self._body(receive)
            await self._run(inner, body, receive, answer)
            status = status or _CLIENT_GONE
        except _Turned as turned:
            state["error"] = turned.code
            await _refuse(answer, turned)
        except _Gone:
            status, state["error"] = _CLIENT_GONE, _CLIENT_LEFT
        finally:
            self._finish(scope["method"], inner, status or 500, time.perf_counter() - started)
            for name in ("send", "chunks"):  # they know the connection, which knows the state: no circle is left
                state.pop(name, None)

    def _authorise(self, scope: Scope, headers: dict[bytes, bytes], state: dict[str, Any]) -> None:
        path = scope["path"]
        probe = path.startswith("/health") or path == "/metrics"
        guarded = self._limits.guards(path) and (probe or scope["method"] != "OPTIONS")
        salt = self._keys.salt(headers.get(b"authorization"))
        if salt is None and guarded:
            raise _Turned(401, "invalid_api_key", "a valid API key is needed: send the header Authorization: Bearer …")
        state["salt"] = salt or ""

    def _check_body(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Refuse, unread, a body that is too long, that has no place here, or whose end cannot be told for sure."""
        codings = [value.lower() for name, value in scope["headers"] if name == b"transfer-encoding"]
        if codings and scope.get("http_version") == "1.0":
            raise _Turned(400, "invalid_framing", "HTTP/1.0 has no transfer-encoding: send a content-length")
        if codings not in ([], [b"chunked"]):
            text = "the only transfer-encoding that is read here is chunked: send the body as it is, or with its length"
            raise _Turned(501, "unsupported_transfer_encoding", text)
        length = headers.get(b"content-length", b"0")
        if not _LENGTH.fullmatch(length):
            raise _Turned(400, "invalid_framing", "the content-length is no number of at most 19 digits")
        if int(length) > self._limits.max_body_bytes:
            raise self._too_large()
        path = scope["path"]
        bodiless = scope["method"] in _BODILESS or path.startswith("/health") or path == "/metrics" or _is_page(path)
        if bodiless and (codings or int(length)):
            text = f"{scope['method']} {path[:200]} takes no body: send the request without one"
            raise _Turned(400, "unexpected_body", text)

    async def _body(self, receive: Receive) -> bytes:
        limits = self._limits
        parts: list[bytes] = []
        held = 0
        try:
            async with asyncio.timeout(limits.body_timeout):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Gone
                    part = message.get("body", b"")
                    more = message.get("more_body", False)
                    held += len(part)
                    self._body_bytes += len(part)
                    parts.append(part)
                    if held > limits.max_body_bytes:
                        raise self._too_large()
                    if self._body_bytes > limits.total_body_bytes:
                        raise _Turned(503, "overloaded", "too many large requests are being sent at once; try again")
        except TimeoutError as error:
            text = f"the request's body did not arrive within {limits.body_timeout:g} s"
            raise _Turned(408, "body_timeout", text) from error
        finally:
            self._body_bytes -= held
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _too_large(self) -> _Turned:
        text = f"the request's body is over the limit of {self._limits.max_body_bytes} bytes (--max-body-bytes)"
        return _Turned(413, "body_too_large", text)

    async def _run(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Run the route; end it when the client goes away first."""
        handed = False
        gone = asyncio.Event()

        async def whole_body() -> Message:
            nonlocal handed
            if not handed:
                handed = True
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        route = asyncio.ensure_future(self._app(scope, whole_body, send))
        watch = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((route, watch), return_when=asyncio.FIRST_COMPLETED)
            if not route.done():
                gone.set()
                route.cancel()
                await asyncio.wait((route,))
            if route.cancelled():
                scope["state"].setdefault("error", _CLIENT_LEFT)  # its stream may have broken off before
            else:
                route.result()
        finally:
            watch.cancel()
            if not route.done():
                route.cancel()

    def _finish(self, given: str, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        method = given if given in _KNOWN_METHODS else "other"
        self._counter.http_request(route, method, status)
        if route.startswith("/health") or route == "/metrics":
            return
        fields: dict[str, object] = {"method": method, "route": route, "status": status, "seconds": round(seconds, 4)}
        if "error" in scope["state"]:
            fields["error"] = scope["state"]["error"]
        log.info("request", extra=fields)


def _is_page(path: str) -> bool:
    return path == "/" or path.startswith("/playground/")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _refuse(send: Send, turned: _Turned) -> None:
    kind = {401: "authentication_error", 503: "overloaded_error"}.get(turned.status, "invalid_request_error")
    body = {"error": {"message": str(turned), "type": kind, "param": None, "code": turned.code}}
    data = json.dumps(body, ensure_ascii=False).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(data)).encode()),
        (b"connection", b"close"),
    ]
    if turned.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": turned.status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
