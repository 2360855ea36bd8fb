"""Is the process alive, can it take work, and what has it counted: `/health/*` and `/metrics`.

Live means that the front end answers; ready means that a worker is up and the service is not shutting down.
Knows no request of any client.
"""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

router = APIRouter()

PROMETHEUS = "text/plain; version=1.0.0; charset=utf-8"


@router.get("/health/live", summary="The front end answers")
@router.get("/health", include_in_schema=False)
async def live() -> JSONResponse:
    """Always 200 while the process runs, also while the model loads or a worker is replaced."""
    return JSONResponse({"status": "live"})


@router.get(
    "/health/ready",
    summary="A worker is up and new requests are taken",
    responses={503: {"description": "Loading, replacing a lost worker, or shutting down: `status` says which"}},
)
async def ready(request: Request) -> JSONResponse:
    """200 when new requests are taken; 503 while loading, while a lost worker is replaced, and while draining."""
    status = request.app.state.service.status
    return JSONResponse({"status": status}, 200 if status == "ready" else 503)


@router.get("/metrics", summary="Counters for Prometheus", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Every metric in the Prometheus text format."""
    return Response(request.app.state.metrics.text(), media_type=PROMETHEUS)
