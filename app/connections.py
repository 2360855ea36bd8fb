"""One client connection: how many there may be, how long a head may be, how slow a client may be.

Knows bytes and times only. Stands under uvicorn's own protocol class, which parses HTTP; everything that is
refused here is refused before a request exists.
"""

import asyncio
from dataclasses import dataclass
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle


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


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits; use a subclass made by `limited`.

    One request at a time: what a client sends behind a request that is not answered yet is dropped, and the connection
    closes with the answer (RFC 9112, 9.3.2 has such clients ask again). uvicorn would queue it, stop reading, and so
    never see that the client has left, while its request computes on.
    """

    limits = ConnectionLimits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._in_head = True
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._flush_timer: asyncio.TimerHandle | None = None
        self._deaf = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self._turn_away(b"503 Service Unavailable", "the server has as many connections as it may (retry later)")
            return
        self._start_head()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self.limits.max_header_bytes:
                # A head and the beginning of a long body may come in one piece: look at the head only.
                end = data.find(b"\r\n\r\n")
                if end < 0 or self._head_bytes - len(data) + end > self.limits.max_header_bytes:
                    self._turn_away(b"431 Request Header Fields Too Large", "the request's head is too long")
                    return
        super().data_received(data)

    def on_message_begin(self) -> None:
        if self._answering:
            self._stop_listening()
            return
        self._cancel(self._flush_timer)
        if not self._in_head:
            self._start_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._deaf:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._deaf:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        if not self._deaf:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._deaf:
            super().on_message_complete()

    def on_headers_complete(self) -> None:
        if self._deaf:
            return
        self._in_head = False
        self._head_bytes = 0
        self._cancel(self._head_timer)
        super().on_headers_complete()
        self.scope["state"]["chunks"] = Chunks(self.cycle)

    def pause_writing(self) -> None:
        self._cancel(self._write_timer)
        loop = asyncio.get_running_loop()
        self._write_timer = loop.call_later(self.limits.write_timeout, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._cancel(self._write_timer)
        super().resume_writing()

    def cut_off_if_stuck(self) -> None:
        """End the connection at once where its client does not take what is written."""
        if self.flow.write_paused or self.transport.get_write_buffer_size():
            self.transport.abort()

    def on_response_complete(self) -> None:
        """The rest of an answer must leave in time, too; it may be too little to pause writing, and wait for ever."""
        super().on_response_complete()
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
        self._in_head = True
        self._head_bytes = 0
        self._cancel(self._head_timer)
        loop = asyncio.get_running_loop()
        self._head_timer = loop.call_later(self.limits.header_timeout, self._head_too_slow)

    def _head_too_slow(self) -> None:
        if self._head_bytes:
            self._turn_away(b"408 Request Timeout", "the request's head did not arrive in time")
        else:
            self.transport.close()

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
            return
        if self.transport.is_closing():
            return
        body = b'{"error": {"message": "%s", "type": "invalid_request_error", "param": null, "code": null}}'
        body %= message.encode()
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
