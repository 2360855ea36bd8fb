"""Streams as server-sent events, and as whole answers: opening, merging, writing, and always closing.

Knows deltas and bytes; what a chunk looks like is the route's. One write for all that one step gave.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, MutableMapping, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, ParamSpec, Protocol, TypeVar

import msgspec
from msgspec.structs import replace
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from app.api.errors import error_event
from app.generation import Delta, Generation, Service, Stream, Token, broken_by

WAITING = b": waiting\n\n"
DONE = b"data: [DONE]\n\n"
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}

encoder = msgspec.json.Encoder()


Shape = TypeVar("Shape")
Arguments = ParamSpec("Arguments")
HEAVY = 4096  # candidates told; shaping them takes some milliseconds


class Piece(msgspec.Struct, frozen=True):
    """What one step gave one prompt of a request. `pulse`: a heartbeat is among it, something must be written."""

    prompt: int
    deltas: tuple[Delta, ...]
    pulse: bool = False


def event(chunk: msgspec.Struct) -> bytes:
    """One event."""
    return b"data: " + encoder.encode(chunk) + b"\n\n"


class Template:
    """Events that differ in one text only: encoded once, then the text is put in its place."""

    __slots__ = ("_after", "_before")

    def __init__(self, chunk: Callable[[str], msgspec.Struct]) -> None:
        """`chunk` is the event's chunk for a text."""
        mark = uuid.uuid4().hex
        self._before, self._after = event(chunk(mark)).split(encoder.encode(mark))

    def event(self, text: str) -> bytes:
        """The event with this text."""
        return self._before + encoder.encode(text) + self._after


async def shaped(
    weight: int, shape: Callable[Arguments, Shape], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Shape:
    """What `shape` makes of its arguments, in a thread where `weight` says that it takes long."""
    if weight <= HEAVY:
        return shape(*args, **kwargs)
    return await asyncio.to_thread(shape, *args, **kwargs)


async def open_streams(stack: AsyncExitStack, service: Service, generations: Sequence[Generation]) -> list[Stream]:
    """One stream a prompt, all open or none: leaving the stack ends them. Raises Refused."""
    return await stack.enter_async_context(service.open_all(generations))


async def pieces(streams: Sequence[Stream]) -> AsyncIterator[Piece]:
    """Everything the streams give, in the order it comes. Raises Broken when one of them cannot go on."""
    if len(streams) == 1:
        async for first in streams[0]:
            yield _step(0, first, streams[0])
        return
    queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue(2 * len(streams))
    tasks = [asyncio.create_task(_pump(number, stream, queue)) for number, stream in enumerate(streams)]
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(number: int, stream: Stream, queue: "asyncio.Queue[Piece | BaseException | None]") -> None:
    try:
        async for first in stream:
            await queue.put(_step(number, first, stream))
    except Exception as error:  # whoever reads the queue raises it
        await queue.put(error)
    else:
        await queue.put(None)


def _step(prompt: int, first: Delta, stream: Stream) -> Piece:
    """What is there at once."""
    rest = stream.take_pending()
    if rest or first.choice < 0:
        deltas = tuple(delta for delta in (first, *rest) if delta.choice >= 0)
        return Piece(prompt, deltas, len(deltas) <= len(rest))
    return Piece(prompt, (first,))


class Writer(Protocol):
    """What a route makes of the deltas of its streams."""

    def events(self, streams: Sequence[Stream]) -> AsyncGenerator[bytes, None]:
        """The whole body."""

    def written(self, streams: Sequence[Stream], deltas: Sequence[Delta]) -> bytes:
        """The events of some deltas, b"" where they tell nothing."""


class Chunks(Protocol):
    """The server's way for pieces of a body that needs no waiting."""

    @property
    def open(self) -> bool:
        """A piece can go out now."""

    def write(self, data: bytes) -> None:
        """Send one piece, not empty."""


class EventResponse(StreamingResponse):
    """A response of ready bytes that closes its streams however it ends.

    A fault after the beginning becomes one error event and the end, never a silent cut. Once the head is out, bytes
    go to the server by the shortest way (`state["send"]`): the layers between only look at heads. The gate ends the
    route when the client goes away, so nobody needs to listen for that here.

    Where one choice is told, nearly every event is one token, and waking a task for it would cost more than making
    it. So from the second event on they go from the worker's message to the socket in one call, by
    `state["chunks"]` where the server offers it; the body's generator sleeps until something else is to be done.
    """

    def __init__(self, writer: Writer, streams: Sequence[Stream], stack: AsyncExitStack) -> None:
        body = writer.events(streams)
        super().__init__(body, media_type="text/event-stream", headers=_HEADERS)
        self._body = body
        self._writer = writer
        self._streams = streams
        self._reader = streams[0].reader
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._body) as body:
                head = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
                await self._sent(send, head)
                await self._write(body, scope["state"])
        finally:
            await self._stack.aclose()

    async def _sent(self, send: Send, message: Message) -> None:
        """While this waits, the client has not taken what was sent before."""
        self._reader.behind = True
        await send(message)
        self._reader.behind = False
        self._reader.last_write = time.monotonic()

    async def _write(self, body: AsyncIterator[bytes], state: MutableMapping[str, Any]) -> None:
        """The body to its end, which a fault makes an error event; `state` gets its code."""
        send: Send = state["send"]
        chunks: Chunks | None = state.get("chunks")
        lone = len(self._streams) == 1 and self._streams[0].num_choices == 1
        try:
            async for data in body:
                await self._sent(send, {"type": "http.response.body", "body": data, "more_body": True})
                if lone and chunks is not None and data is not WAITING:
                    lone = False
                    self._streams[0].listen(self._shortcut(chunks))
            last = b""
        except Exception as error:
            broken = broken_by(error)
            for stream in self._streams:
                stream.fail(broken)
            state["error"] = broken.code
            last = error_event(broken)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _shortcut(self, chunks: Chunks) -> Callable[[Delta], bool]:
        """Writes a delta where that can be done at once, and says whether it did."""
        reader = self._reader

        def write(delta: Delta) -> bool:
            if not chunks.open:
                return False
            data = self._writer.written(self._streams, (delta,))
            if data:
                chunks.write(data)
                reader.last_write = time.monotonic()
            return True

        return write


async def collected(streams: Sequence[Stream], keep_tokens: bool) -> dict[tuple[int, int], Delta]:
    """The joined deltas of each (prompt, choice): the whole answers. Tokens are kept only where they are told."""
    texts: dict[tuple[int, int], list[str]] = {}
    tokens: dict[tuple[int, int], list[Token]] = {}
    last: dict[tuple[int, int], Delta] = {}
    async for piece in pieces(streams):
        for delta in piece.deltas:
            place = (piece.prompt, delta.choice)
            texts.setdefault(place, []).append(delta.text)
            if keep_tokens:
                tokens.setdefault(place, []).extend(delta.tokens)
            blocks = delta.blocks or (last[place].blocks if place in last else ())
            last[place] = replace(delta, blocks=blocks)
    return {
        place: replace(last[place], text="".join(texts[place]), tokens=tuple(tokens.get(place, ())))
        for place in sorted(last)
    }
