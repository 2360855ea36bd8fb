"""The OpenAPI page: what each endpoint takes and answers, from the very schemas that check and encode it.

Knows how FastAPI's document is put together; knows no route.
"""

from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import FastAPI

from app.api import answers, errors, schemas_requests

_REF = "#/components/schemas/"
_KEY = "key"
REQUESTS = (
    schemas_requests.CompletionRequest,
    schemas_requests.ChatRequest,
    schemas_requests.TokenizeRequest,
    schemas_requests.DetokenizeRequest,
)
ANSWERS = (
    errors.ErrorBody,
    answers.Completion,
    answers.ChatCompletion,
    answers.ChatChunk,
    answers.Tokenized,
    answers.Detokenized,
    answers.Model,
    answers.Models,
)
_REFUSALS = {
    400: "A field is wrong: the body names it",
    401: "No valid API key",
    404: "No such model",
    408: "The body did not arrive in time",
    413: "The body is over the limit",
    415: "The body is not JSON",
    429: "The queue is full: try again after Retry-After seconds",
    500: "A fault of the server's own; its log says why",
    503: "The model is loading, or the server is shutting down",
}
_TOO_LATE = "The time of the request (--request-timeout, or its field `timeout`) was over before anything was streamed"


def documented(
    request: type | None, answer: type, chunk: type | None = None, names_model: bool = True
) -> dict[str, Any]:
    """Arguments of a route's decorator: the body it takes, the answer, and the refusals there are."""
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": _REF + answer.__name__}}}
    if chunk is not None:
        text = f"server-sent events, each one a {chunk.__name__}; the last is [DONE]"
        content["text/event-stream"] = {"schema": {"type": "string", "description": text}}
    refusal = {"application/json": {"schema": {"$ref": _REF + errors.ErrorBody.__name__}}}
    responses: dict[int, Any] = {200: {"description": "The answer", "content": content}}
    for status, text in _REFUSALS.items():
        told = request is not None or status in (401, 404, 500, 503)
        if told and (names_model or status != 404) and (chunk is not None or status != 429):
            responses[status] = {"description": text, "content": refusal}
    if chunk is not None:  # it generates
        responses[504] = {"description": _TOO_LATE, "content": refusal}
    route: dict[str, Any] = {"responses": responses}
    if request is not None:
        schema = {"application/json": {"schema": {"$ref": _REF + request.__name__}}}
        route["openapi_extra"] = {"requestBody": {"required": True, "content": schema}}
    return route


def _tell_keys(operation: dict[str, Any], asked: bool) -> None:
    """What the document says of an operation's key: that it asks for one and what it answers without, or neither."""
    if asked:
        operation["security"] = [{_KEY: []}]
        refusal = {"application/json": {"schema": {"$ref": _REF + errors.ErrorBody.__name__}}}
        operation["responses"].setdefault("401", {"description": _REFUSALS[401], "content": refusal})
    else:
        operation["responses"].pop("401", None)


def install(app: FastAPI, guards: Callable[[str], bool] | None) -> None:
    """Add the schemas of requests and answers, and who may call what, to the application's document.

    `guards`: whether a path is answered only to those who show an API key; None where nobody needs one.
    """
    original = app.openapi

    def openapi() -> dict[str, Any]:
        document = original()
        components = document.setdefault("components", {}).setdefault("schemas", {})
        for path, operations in document["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)  # FastAPI's own checks; ours answer 400, and a path is any text
                _tell_keys(operation, guards is not None and guards(path))
        if guards is not None:
            document["components"]["securitySchemes"] = {_KEY: {"type": "http", "scheme": "bearer"}}
        for name in ("HTTPValidationError", "ValidationError"):
            components.pop(name, None)
        for request in REQUESTS:
            schema = request.model_json_schema(ref_template=_REF + "{model}")
            components.update(schema.pop("$defs", {}))
            components[request.__name__] = schema
        components.update(msgspec.json.schema_components(ANSWERS, ref_template=_REF + "{name}")[1])
        return document

    app.openapi = openapi  # type: ignore[method-assign] # FastAPI's documented way to extend the document
