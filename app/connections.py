"""One client connection: how many there may be, how long a head, how slow a client, and what frames an answer.

Knows bytes and times only. Stands under uvicorn's own protocol class, which parses HTTP; what is refused here is
refused without the routes: before a request exists, or before it is whole.
"""

import asyncio
import sys
from dataclasses import dataclass
from typing import Any, cast

from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

FIELD_BYTES = 32  # what a header field costs beside its name and value (RFC 7541, 4.1, counts as much)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Counts, bytes, seconds."""

    max_connections: int = 4096
    max_header_bytes: int = 64 << 10
    header_timeout: float = 10.0
    write_timeout: float = 30.0


class Chunks:
    """The shortest way for pieces of a body between its head and its end: no coroutine, no message."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def open(self) -> bool:
        """A piece can go out now: the head is out, the body is sent in chunks, the client keeps up."""
        cycle = self._cycle
        begun = cycle.chunked_encoding and not cycle.response_complete
        return bool(begun and not cycle.flow.write_paused and not cycle.disconnected)

    def write(self, data: bytes) -> None:
        """Send one piece, not empty; only while `open`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class Unframed:
    """Around the application, for a client of HTTP/1.0, which knows no chunks (RFC 9112, 6.1).

    An answer without a length goes out as it is and ends with the connection, which uvicorn closes after every answer
    to such a client.
    """

    def __init__(self, app: ASGI3Application, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """One request: uvicorn sees pieces that are each as long as was promised."""
        cycle, bare = self._cycle, False

        async def unframed(message: ASGISendEvent) -> None:
            nonlocal bare
            if message["type"] == "http.response.start":
                bare = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                if bare:
                    cycle.chunked_encoding = False
            elif bare and message["type"] == "http.response.body":
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, unframed)


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits; use a subclass made by `limited`.

    One request at a time: what a client sends behind a request that is not answered yet is dropped, and the connection
    closes with the answer (RFC 9112, 9.3.2 has such clients ask again). uvicorn would queue it, stop reading, and so
    never see that the client has left, while its request computes on.

    Two counts bound what the parser takes. `_fields`: the head and the trailers of a request, exactly, as they are
    parsed. `_unseen`: the bytes since the parser last gave a whole head, a piece of a body, or a request's end; a field
    that does not end, empty lines before a request, and chunk extensions show nowhere else.
    """

    limits = ConnectionLimits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fields = 0
        self._unseen = 0
        self._in_head = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._flush_timer: asyncio.TimerHandle | None = None
        self._deaf = False
        self._piece = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self._turn_away(b"503 Service Unavailable", "the server has as many connections as it may (retry later)")
            return
        self._start_head()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        if self._head_timer is None and not self._answering:  # the first byte after an answered request
            self._start_head()
        self._unseen += len(data)
        self._piece = data
        super().data_received(data)
        self._piece = b""
        if self._unseen > self.limits.max_header_bytes:
            self._too_long()

    def on_message_begin(self) -> None:
        if self._deaf:
            return
        if self._answering:
            self._stop_listening()
            return
        self._cancel(self._flush_timer)
        self._in_head = True
        self._fields = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._deaf:
            self._count(len(url))
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field of the head, or of the trailers, which are counted and dropped: nobody here reads them."""
        if not self._deaf:
            self._count(len(name) + len(value) + FIELD_BYTES)
            if self._in_head:
                super().on_header(name, value.rstrip(b" \t"))  # RFC 9110, 5.5; the parser leaves it to us

    def on_body(self, body: bytes) -> None:
        self._unseen = 0
        if not self._deaf:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._unseen = 0
        if not self._deaf and not (self.parser.should_upgrade() and self._framing()):
            super().on_message_complete()

    def on_headers_complete(self) -> None:
        if self._deaf:
            return
        self._in_head = False
        self._unseen = 0
        self._cancel(self._head_timer)
        self._head_timer = None
        if self.parser.get_http_version() not in ("1.0", "1.1"):
            self._turn_away(b"505 HTTP Version Not Supported", "this server speaks HTTP/1.1 and HTTP/1.0")
            return
        super().on_headers_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """What uvicorn calls where a client offers another protocol: go on in this one (RFC 9110, 7.8).

        Every client on Java's own HttpClient offers HTTP/2. The parser takes such a head for the whole request and
        stops behind it, so another parser is told what frames the body, and reads on.
        """
        stopped = sys.exception()  # uvicorn handles it just now; it holds how much of the piece was read
        if self._deaf or stopped is None:
            return
        framing = self._framing()
        if framing:
            self.parser = type(self.parser)(self)
            self._deaf = True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n")
            self._deaf = False
        super().data_received(self._piece[stopped.args[0] :])

    def _framing(self) -> bytes:
        """The lines of the head that frame a body, b"" where none comes."""
        fields = dict(self.headers)
        length, coding = fields.get(b"content-length", b""), fields.get(b"transfer-encoding", b"")
        if coding:
            return b"transfer-encoding: chunked\r\n"
        return b"content-length: %b\r\n" % length if length.strip(b"0") else b""

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if cycle.scope["http_version"] == "1.0":
            cycle.waiting_for_100_continue = False  # RFC 9110, 10.1.1
            app = Unframed(app, cycle)
        else:
            cycle.scope["state"]["chunks"] = Chunks(cycle)
        super()._start_asgi_task(cycle, app)

    def pause_writing(self) -> None:
        self._cancel(self._write_timer)
        loop = asyncio.get_running_loop()
        self._write_timer = loop.call_later(self.limits.write_timeout, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._cancel(self._write_timer)
        super().resume_writing()

    def cut_off(self) -> None:
        """End a connection that is still busy: with a refusal where its request has no answer yet, else at once."""
        if self.flow.write_paused or self.transport.get_write_buffer_size():
            self.transport.abort()
        elif self._answering:
            self._refuse(b"503 Service Unavailable", "the server is shutting down; send the request to another one")

    def on_response_complete(self) -> None:
        """The rest of an answer must leave in time, too; it may be too little to pause writing, and wait for ever.

        What was answered before it was whole is not read any further: the connection ends.
        """
        super().on_response_complete()
        if self.cycle.more_body:
            self._deaf = True
            self.transport.close()
        self._cancel(self._flush_timer)
        if self.transport.get_write_buffer_size():
            loop = asyncio.get_running_loop()
            self._flush_timer = loop.call_later(self.limits.write_timeout, self._flush_too_slow)

    def _flush_too_slow(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel(self._head_timer)
        self._cancel(self._write_timer)
        self._cancel(self._flush_timer)
        super().connection_lost(exc)

    def _start_head(self) -> None:
        loop = asyncio.get_running_loop()
        self._head_timer = loop.call_later(self.limits.header_timeout, self._head_too_slow)

    def _head_too_slow(self) -> None:
        if self._in_head:
            self._turn_away(b"408 Request Timeout", "the request's head did not arrive in time")
        else:  # no request has begun, so nobody waits for an answer
            self.transport.close()

    def _count(self, size: int) -> None:
        self._fields += size
        if self._fields > self.limits.max_header_bytes:
            self._too_long()

    def _too_long(self) -> None:
        text = f"the request's head or trailers, or its chunks' heads, are over {self.limits.max_header_bytes} bytes"
        self._turn_away(b"431 Request Header Fields Too Large", text + " (--max-header-bytes)")

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls where the bytes are no HTTP: the refusal in our own shape."""
        self._turn_away(b"400 Bad Request", "this is no valid HTTP request: its head, length or chunks are malformed")

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _stop_listening(self) -> None:
        self._deaf = True
        self.cycle.keep_alive = False

    def _turn_away(self, status: bytes, message: str) -> None:
        if self._answering and not self.cycle.more_body:  # what came behind a whole request: that one is answered still
            self._stop_listening()
        else:
            self._refuse(status, message)

    def _refuse(self, status: bytes, message: str) -> None:
        """Close, after an answer of our own where none has begun."""
        self._deaf = True
        if self.transport.is_closing():
            return
        if self._answering:
            self.cycle.disconnected = True  # whoever reads or answers this request ends now
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.abort()
                return
        kind = b"overloaded_error" if status.startswith(b"503") else b"invalid_request_error"
        body = b'{"error": {"message": "%s", "type": "%s", "param": null, "code": null}}' % (message.encode(), kind)
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(body)) + body)
        self.transport.close()

    @staticmethod
    def _cancel(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


def limited(limits: ConnectionLimits) -> type[asyncio.Protocol]:
    """A protocol class with these limits, for `uvicorn.Config(http=…)`."""
    return cast(type[asyncio.Protocol], type("Connection", (LimitedProtocol,), {"limits": limits}))
