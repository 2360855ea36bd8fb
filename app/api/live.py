"""`/live`: the service's own counters as server-sent events, twice a second, for as long as somebody looks.

Knows a snapshot of plain numbers and its encoding; does not know what they mean. Guarded by the API key where
keys are set, like every route that is not health or metrics. All viewers look at the same moments, so that a
snapshot is made once however many they are.
"""

import asyncio
from collections.abc import AsyncIterator

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from starlette.datastructures import State

PERIOD = 0.5  # seconds between two snapshots
FIRST_STEPS = 200  # steps before its coming that a viewer is told of

router = APIRouter(include_in_schema=False)


class Ticker:
    """The events of the present tick of the clock, each made when the first viewer asks for it."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._tick = -1
        self._made: dict[int, bytes] = {}
        self._upto = 0

    def event(self, since: int) -> tuple[bytes, int]:
        """The event for a viewer that knows the steps up to number `since`, and up to which it knows them then."""
        tick = int(asyncio.get_running_loop().time() / PERIOD)
        if tick != self._tick:
            self._tick, self._made, self._upto = tick, {}, self._state.live.step_number
        made = self._made.get(since)
        if made is None:
            snapshot = self._state.live.snapshot(since, self._upto)
            ready = {"ready": self._state.service.status == "ready"}
            made = self._made[since] = b"data: " + msgspec.json.encode(snapshot | ready) + b"\n\n"
        return made, self._upto

    async def next(self) -> None:
        """Wait for the tick after this one, and a little more: a timer may go off a millisecond early."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(PERIOD - loop.time() % PERIOD + 0.002)


@router.get("/live")
async def live(request: Request) -> StreamingResponse:
    """Events of `LiveFeed.snapshot` with `ready` beside it: whether requests are served now."""
    return StreamingResponse(_events(request), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def _events(request: Request) -> AsyncIterator[bytes]:
    state = request.app.state
    ticker: Ticker = state.ticker
    seen = max(0, state.live.step_number - FIRST_STEPS)
    while not await request.is_disconnected() and not state.service.draining:
        event, seen = ticker.event(seen)
        yield event
        await ticker.next()
