"""`/v1/models`: the one model that is served, and what it can do.

Knows what the worker said of itself; nothing of requests.
"""

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.api.answers import Model, Models
from app.api.documentation import documented
from app.api.door import check_model
from app.api.events import encoder

router = APIRouter()


@router.get("/v1/models", summary="The models that are served", **documented(None, Models, names_model=False))
async def models(request: Request) -> Response:
    """A list of one: the model, its context and the retention policies it can honour."""
    return Response(encoder.encode(Models("list", [_model(request)])), media_type="application/json")


@router.get("/v1/models/{name:path}", summary="One model", **documented(None, Model))
async def model(request: Request, name: str) -> Response:
    """The model of that name, or 404."""
    check_model(name, request.app.state.service.model)
    return Response(encoder.encode(_model(request)), media_type="application/json")


def _model(request: Request) -> Model:
    service = request.app.state.service
    ready = service.ready
    return Model(
        service.model, "model", service.created, "everstream", ready.context, ready.family, tuple(ready.policies)
    )
