"""Framing of the protocol: a four-byte big-endian length, then MessagePack, over a stream socket.

A blocking side for the worker and an asyncio side for the front end. Knows bytes and message types; does
not know what a message means. A frame over MAX_FRAME, or one that does not decode, ends the connection.
"""

import asyncio
import socket
import struct
import threading

import msgspec

from model.protocol import Down, Up

MAX_FRAME = 64 << 20
_HEADER = struct.Struct(">I")


class ConnectionClosed(Exception):
    """The other side is gone, or sent bytes that are no frame of ours."""


def encode(message: Down | Up) -> bytes:
    """One frame, ready to send."""
    body = msgspec.msgpack.encode(message)
    return _HEADER.pack(len(body)) + body


class BlockingConnection:
    """The worker's side. `send` may be called from several threads; `receive` from one.

    A thread of its own reads, from the first `receive` on: a socket holds some 200 kB, and what a crowd sends during
    one long step must not come in over many, with the words of those who left again behind it.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()
        self._buffer = bytearray()
        self._decoder = msgspec.msgpack.Decoder(Down)
        self._arrived = threading.Condition()
        self._messages: list[Down] = []
        self._closed: ConnectionClosed | None = None
        self._reader = threading.Thread(target=self._read, name="reader", daemon=True)

    def send(self, message: Up) -> None:
        """Send one message whole. Raises ConnectionClosed when the front end is gone."""
        frame = encode(message)
        with self._sending:
            try:
                self._socket.sendall(frame)
            except OSError as error:
                raise ConnectionClosed(f"the front end is gone: {error}") from error

    def receive(self, timeout: float | None) -> list[Down]:
        """All whole messages that have arrived, waiting up to `timeout` seconds (None: for ever) for the first.

        Raises ConnectionClosed when the front end is gone and all its messages were taken.
        """
        if self._reader.ident is None:
            self._reader.start()
        with self._arrived:
            if not (self._messages or self._closed or timeout == 0):
                self._arrived.wait_for(lambda: self._messages or self._closed, timeout)
            messages, self._messages = self._messages, []
            if not messages and self._closed:
                raise self._closed
            return messages

    def _read(self) -> None:
        closed = None
        while closed is None:
            messages: list[Down] = []
            try:
                messages = self._read_some()
            except ConnectionClosed as error:
                closed = error
            with self._arrived:
                self._messages += messages
                self._closed = closed
                self._arrived.notify()

    def _read_some(self) -> list[Down]:
        try:
            data = self._socket.recv(1 << 20)
        except OSError as error:
            raise ConnectionClosed(f"the front end is gone: {error}") from error
        if not data:
            raise ConnectionClosed("the front end closed the connection")
        self._buffer += data
        return self._whole_messages()

    def _whole_messages(self) -> list[Down]:
        messages: list[Down] = []
        start = 0
        while len(self._buffer) - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer, start)
            if length > MAX_FRAME:
                raise ConnectionClosed(f"a frame of {length} bytes is over the limit of {MAX_FRAME}")
            if len(self._buffer) - start < _HEADER.size + length:
                break
            start += _HEADER.size
            try:
                messages.append(self._decoder.decode(bytes(self._buffer[start : start + length])))
            except msgspec.MsgspecError as error:
                raise ConnectionClosed(f"a frame does not decode: {error}") from error
            start += length
        del self._buffer[:start]
        return messages


class AsyncConnection:
    """The front end's side, over asyncio streams."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = msgspec.msgpack.Decoder(Up)

    def send(self, message: Down) -> None:
        """Queue one message for sending; never blocks. Raises ConnectionClosed once the worker is gone."""
        if self._writer.is_closing():
            raise ConnectionClosed("the worker's connection is closed")
        self._writer.write(encode(message))

    async def receive(self) -> Up:
        """The next message. Raises ConnectionClosed when the worker is gone."""
        try:
            (length,) = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
            if length > MAX_FRAME:
                raise ConnectionClosed(f"a frame of {length} bytes is over the limit of {MAX_FRAME}")
            return self._decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError, msgspec.MsgspecError) as error:
            raise ConnectionClosed(f"the worker is gone: {error}") from error

    def close(self) -> None:
        """Close the socket; a pending `receive` ends with ConnectionClosed."""
        self._writer.close()
