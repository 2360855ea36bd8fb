"""Streams as server-sent events, and as whole answers: opening, merging, writing, and always closing.

Knows deltas and bytes; what a chunk looks like is the route's. One write for all that one step gave.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import ParamSpec, TypeVar

import msgspec
from msgspec.structs import replace
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from app.api.errors import error_event
from app.generation import Broken, Delta, Generation, Service, Stream, Token

log = logging.getLogger("everstream.api")

WAITING = b": waiting\n\n"
DONE = b"data: [DONE]\n\n"
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}

encoder = msgspec.json.Encoder()


Shape = TypeVar("Shape")
Arguments = ParamSpec("Arguments")
HEAVY = 4096  # candidates told; shaping them takes some milliseconds


class Piece(msgspec.Struct, frozen=True):
    """What one step gave one prompt of a request; `deltas` is empty for a heartbeat."""

    prompt: int
    deltas: tuple[Delta, ...]


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
    return [await stack.enter_async_context(service.open(generation)) for generation in generations]


async def pieces(streams: Sequence[Stream]) -> AsyncIterator[Piece]:
    """Everything the streams give, in the order it comes. Raises Broken when one of them cannot go on."""
    if len(streams) == 1:
        async for first in streams[0]:
            yield Piece(0, _step(first, streams[0]))
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
            await queue.put(Piece(number, _step(first, stream)))
    except Exception as error:  # whoever reads the queue raises it
        await queue.put(error)
    else:
        await queue.put(None)


def _step(first: Delta, stream: Stream) -> tuple[Delta, ...]:
    """What is there at once, without heartbeats beside it; () is a heartbeat."""
    rest = stream.take_pending()
    if rest or first.choice < 0:
        return tuple(delta for delta in (first, *rest) if delta.choice >= 0)
    return (first,)


class EventResponse(StreamingResponse):
    """A response of ready bytes that closes its streams however it ends.

    A fault after the beginning becomes one error event and the end, never a silent cut. Once the head is out, bytes
    go to the server by the shortest way (`state["send"]`): the layers between only look at heads. The gate ends the
    route when the client goes away, so nobody needs to listen for that here.
    """

    def __init__(self, body: AsyncGenerator[bytes, None], stack: AsyncExitStack) -> None:
        super().__init__(body, media_type="text/event-stream", headers=_HEADERS)
        self._body = body
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._body) as body:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await _write(body, scope["state"]["send"])
        finally:
            await self._stack.aclose()


async def _write(body: AsyncIterator[bytes], send: Send) -> None:
    """The body to its end, which a fault makes an error event."""
    try:
        async for data in body:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        last = b""
    except Broken as broken:
        last = error_event(broken)
    except Exception as error:
        log.exception("a stream failed")
        last = error_event(Broken(f"the server failed at this stream ({type(error).__name__}); its log says why"))
    await send({"type": "http.response.body", "body": last, "more_body": False})


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
