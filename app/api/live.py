"""`/live`: the service's own counters as server-sent events, twice a second, for as long as somebody looks.

Knows a snapshot of plain numbers and its encoding; does not know what they mean. Guarded by the API key where
keys are set, like every route that is not health or metrics.
"""

import asyncio
from collections.abc import AsyncIterator

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse

PERIOD = 0.5  # seconds between two snapshots

router = APIRouter(include_in_schema=False)


@router.get("/live")
async def live(request: Request) -> StreamingResponse:
    """Events of `LiveFeed.snapshot` with `ready` beside it: whether requests are served now."""
    return StreamingResponse(_events(request), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def _events(request: Request) -> AsyncIterator[bytes]:
    state = request.app.state
    seen = max(0, state.live.step_number - 200)
    while not await request.is_disconnected() and not state.service.draining:
        snapshot = state.live.snapshot(seen)
        seen = snapshot["last_step"]
        yield b"data: " + msgspec.json.encode(snapshot | {"ready": state.service.status == "ready"}) + b"\n\n"
        await asyncio.sleep(PERIOD)
