"""Every answer that is not a success: OpenAI's error body, and the handlers that write it.

Knows status codes and sentences; knows no route. Faults of ours are logged and answered without their details.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Protocol, cast

import msgspec
from fastapi import FastAPI, HTTPException
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import Request
from starlette.responses import Response

log = logging.getLogger("everstream.api")

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "overloaded_error"}
_CODES = {404: "not_found", 405: "method_not_allowed"}

Handler = Callable[[Request, Exception], Awaitable[Response]]


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong: a sentence, its kind, the field it is about, and a short code for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every refusal."""

    error: ErrorDetail


class Invalid(Exception):
    """The request cannot be served as it is: 400, or another status of the client's. Names the field."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status


class Fault(Protocol):
    """What the service raises: a sentence, a status, a code."""

    @property
    def message(self) -> str: ...
    @property
    def status(self) -> int: ...
    @property
    def code(self) -> str | None: ...


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> ErrorBody:
    """OpenAI's body for a status."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return ErrorBody(ErrorDetail(message, kind, param, code))


def error_event(fault: Fault) -> bytes:
    """The one event that ends a stream by a fault."""
    return b"data: " + msgspec.json.encode(error_body(fault.status, fault.message, None, fault.code)) + b"\n\n"


def error_response(
    status: int, message: str, param: str | None = None, code: str | None = None, headers: dict[str, str] | None = None
) -> Response:
    """The whole answer of a refusal."""
    body = msgspec.json.encode(error_body(status, message, param, code))
    return Response(body, status, headers, media_type="application/json")


async def _on_fault(request: Request, error: Exception) -> Response:
    fault = cast(Fault, error)
    request.state.error = fault.code or "invalid"  # for the access log, as in the others
    wait = getattr(error, "retry_after", None)
    headers = {"Retry-After": str(wait)} if wait else None
    return error_response(fault.status, fault.message, getattr(error, "param", None), fault.code, headers)


async def _on_http(request: Request, error: Exception) -> Response:
    refusal = cast(HTTPException, error)
    what = {404: "there is nothing at this address", 405: "this address does not take that method"}
    message = what.get(refusal.status_code, str(refusal.detail))
    text = f"{message}: {request.method} {request.url.path[:200]}"
    headers = dict(refusal.headers) if refusal.headers else None
    request.state.error = _CODES.get(refusal.status_code, "invalid")
    return error_response(refusal.status_code, text, None, _CODES.get(refusal.status_code), headers)


async def _on_bug(request: Request, error: Exception) -> Response:
    log.error("unexpected error", exc_info=error)
    request.state.error = "internal_error"
    return error_response(500, "the server failed at this request; its log says why", code="internal_error")


def install(app: FastAPI, faults: tuple[type[Exception], ...] = ()) -> None:
    """Answer every failure in OpenAI's shape; `faults` are the service's own exceptions (see `Fault`)."""
    app.add_exception_handler(Invalid, _on_fault)
    for kind in faults:
        app.add_exception_handler(kind, _on_fault)
    app.add_exception_handler(StarletteHTTPException, _on_http)
    app.add_exception_handler(Exception, _on_bug)
