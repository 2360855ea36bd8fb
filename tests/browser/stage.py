"""A stage for the page alone: the real playground routes, and answers scripted by the test instead of a model.

Serves what the page asks for (`/v1/models`, `/live`, both completions routes) with content a model would not
say on demand: markup, scripts, bidirectional marks, very long words, twenty thousand tokens.
"""

import asyncio
import json
import math
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from app.api import playground


@dataclass
class Script:
    """What the next answer is: its pieces, how many a second (0: at once), and an error after the last one."""

    pieces: list[str] = field(default_factory=list)
    rate: float = 0.0
    trace: bool = False
    error: str = ""
    cut: bool = False
    ready: bool = True
    bodies: list[dict] = field(default_factory=list)


def trace_entry(piece: str, number: int) -> dict:
    """A trace as the API gives it, with plain numbers that a test can recompute."""
    p = 0.9 * (number % 10 + 1) / 10
    stages = [p, p, p, p, p, p, p]
    rest = [
        {"id": 7, "token": "x", "bytes": [120], "logprob": math.log(1 - p), "stages": [1 - p, 1 - p, 1 - p, 0, 0, 0, 0]}
    ]
    own = {"id": number, "token": piece, "bytes": list(piece.encode()), "logprob": math.log(p), "stages": stages}
    return own | {"rank": 0, "entropy": 1.0, "candidates": [own, *rest]}


def create_stage(script: Script) -> FastAPI:
    """The app; the test changes `script` between requests."""
    app = FastAPI()
    app.include_router(playground.router)

    @app.get("/v1/models")
    async def models() -> dict:
        return {"object": "list", "data": [{"id": "stage", "object": "model"}]}

    @app.get("/live")
    async def live(request: Request) -> StreamingResponse:
        async def snapshots() -> AsyncIterator[bytes]:
            quantiles = {"p50": None, "p90": None, "p99": None}
            empty = {"workers": {}, "restarts": 0, "resumed": 0, "tokens": 0, "steps": []}
            while not await request.is_disconnected():
                snapshot = empty | {
                    "first_token_seconds": quantiles,
                    "inter_token_seconds": quantiles,
                    "ready": script.ready,
                }
                yield f"data: {json.dumps(snapshot)}\n\n".encode()
                await asyncio.sleep(0.2)

        return StreamingResponse(snapshots(), media_type="text/event-stream")

    async def answer(request: Request) -> Response:
        body = await request.json()
        script.bodies.append(body)
        if script.error and not script.pieces:
            return JSONResponse(
                {"error": {"message": script.error, "type": "invalid_request_error", "param": None}}, 400
            )
        return StreamingResponse(events(script, "messages" in body), media_type="text/event-stream")

    app.add_api_route("/v1/chat/completions", answer, methods=["POST"])
    app.add_api_route("/v1/completions", answer, methods=["POST"])
    return app


async def events(script: Script, chat: bool) -> AsyncIterator[bytes]:
    """The scripted answer as server-sent events."""
    start = time.monotonic()
    for number, piece in enumerate(script.pieces):
        choice = {"index": 0, "finish_reason": None} | ({"delta": {"content": piece}} if chat else {"text": piece})
        if script.trace:
            choice["trace"] = [trace_entry(piece, number)]
        yield f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
        if script.rate:
            await asyncio.sleep(max(0.0, start + (number + 1) / script.rate - time.monotonic()))
    if script.cut:
        return
    if script.error:
        yield f"data: {json.dumps({'error': {'message': script.error}})}\n\n".encode()
        return
    end = {"index": 0, "finish_reason": "stop"} | ({"delta": {}} if chat else {"text": ""})
    usage = {"prompt_tokens": 3, "completion_tokens": len(script.pieces), "total_tokens": 3 + len(script.pieces)}
    yield f"data: {json.dumps({'choices': [end]})}\n\n".encode()
    yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode()


class Stage:
    """The app on a port of its own, in a thread."""

    def __init__(self, port: int) -> None:
        self.script = Script()
        self.url = f"http://127.0.0.1:{port}/"
        config = uvicorn.Config(
            create_stage(self.script), host="127.0.0.1", port=port, log_level="critical", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def start(self) -> None:
        """Serve until `stop`."""
        self._thread.start()
        while not self._server.started:
            time.sleep(0.02)

    def stop(self) -> None:
        """End the server and its thread."""
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(10)

    def play(self, *pieces: str, **rest: object) -> None:
        """Set the next answer."""
        fresh = Script(pieces=list(pieces), **rest)  # type: ignore[arg-type]  # fields of Script by name
        self.script.__dict__.update(fresh.__dict__)
