"""A request's bytes to a checked request, or a 4xx that names what is wrong; never a 500.

Knows JSON and schemas. The size limit and the reading itself are the gate's; what the model can do is the door's.
"""

import itertools
from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from app.api.errors import Invalid
from app.api.large_bodies import LONG, MESSAGE_NULLS, Turns, fields_of, read
from app.api.schemas import HARMLESS, NOT_HONOURED, Strict

Body = TypeVar("Body", bound=Strict)

_ARMS = ("str", "int", "[key]")
_UNIONS = {"prompt": "it must be a text, a list of token ids, or a list of either"}
_TURNS = Turns()


async def read_body(request: Request, kind: type[Body]) -> Body:
    """The request's body as `kind`. Raises Invalid: 415 for a content type or encoding, 400 for everything else."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        shown = content_type[:80] or "missing"
        raise Invalid(
            f"the content type is {shown!r}; send JSON with the header Content-Type: application/json",
            code="unsupported_media_type",
            status=415,
        )
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise Invalid(
            f"bodies in the content encoding {encoding[:80]!r} are not read; send plain JSON",
            code="unsupported_media_type",
            status=415,
        )
    data = await request.body()
    if len(data) <= LONG:
        return parse_body(data, kind)
    return await _TURNS.read(data, lambda data: parse_body(data, kind))


def parse_body(data: bytes, kind: type[Body]) -> Body:
    """`data` as a checked request. Raises Invalid."""
    ids: dict[str, Any] = {}
    if len(data) > LONG:
        value, ids = fields_of(data, kind)
    else:
        value = _read_short(data)
    try:
        body = kind.model_validate(_honoured(value, kind))
    except RecursionError as error:
        raise Invalid("the body is nested too deeply", code="invalid_json") from error
    except ValidationError as error:
        first = _told(error.errors(include_url=False))
        raise Invalid(_sentence(first), _path(first) if first["loc"] else None, "invalid_value") from error
    return body.model_copy(update=ids) if ids else body


def _read_short(data: bytes) -> dict[str, Any]:
    try:
        value = read(data)
    except Invalid as error:
        if error.code == "invalid_value":
            error.param = _out_of_range(data)
        raise
    if not isinstance(value, dict):
        raise Invalid("the body must be a JSON object", code="invalid_json")
    return value


def _out_of_range(data: bytes) -> str | None:
    """The first field with a number that cannot be held; None where the body is no object."""
    try:
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return None
    for name, raw in fields.items():
        try:
            msgspec.json.decode(raw)
        except msgspec.DecodeError:
            return name[:200]
    return None


def _honoured(value: dict[str, Any], kind: type[Strict]) -> dict[str, Any]:
    """The fields that mean something: without harmless ones, and without neutral values of those not served."""
    known = kind.model_fields
    fields: dict[str, Any] = {}
    for name, given in value.items():
        if name in known:
            fields[name] = given
        elif name in HARMLESS or (name in NOT_HONOURED and given is None):
            continue
        elif name in NOT_HONOURED:
            neutral, why = NOT_HONOURED[name]
            if not any(_same(given, one) for one in neutral):
                raise Invalid(f"the field {name!r} {why}", name, "unsupported_parameter")
        else:
            fields[name] = given  # the schema refuses it by name
    if isinstance(fields.get("messages"), list):
        fields["messages"] = [_message(message, place) for place, message in enumerate(fields["messages"])]
    return fields


def _message(message: Any, place: int) -> Any:
    """A message without what answers carry and say nothing with: null or empty tool calls and the like."""
    if not isinstance(message, dict):
        return message
    if message.get("role") in ("tool", "function"):
        raise Invalid("messages of tools are not served yet; leave them out", f"messages.{place}.role", "unsupported")
    for name in MESSAGE_NULLS & message.keys():
        if message[name] not in (None, []):
            raise Invalid(f"the message's {name!r} is not served yet", f"messages.{place}.{name}", "unsupported")
    return {name: value for name, value in message.items() if name not in MESSAGE_NULLS}


def _same(given: Any, neutral: Any) -> bool:
    return bool(given == neutral) and isinstance(given, bool) == isinstance(neutral, bool)


def _told(faults: list[ErrorDetails]) -> ErrorDetails:
    """The first fault; where it is an arm of a union, that of the arm which came furthest into the value."""
    first = faults[0]
    place = first["loc"][:-1]
    if not place or first["loc"][-1] not in _ARMS or place[0] in _UNIONS:
        return first
    of_arms = [fault for fault in faults if fault["loc"][: len(place)] == place]
    return max(of_arms, key=lambda fault: (len(fault["loc"]), not fault["type"].endswith("_type")))


def _path(fault: ErrorDetails) -> str:
    """Where the fault is, as "messages.0.content": without pydantic's names for the arms of a union."""
    first, *rest = (str(part) for part in fault["loc"]) if fault["loc"] else ("",)
    kept = [part for part in rest if part not in _ARMS and not part.startswith(("list[", "constrained", "function-"))]
    return ".".join((first, *kept))[:200]


def _sentence(fault: ErrorDetails) -> str:
    where = _path(fault)
    if fault["type"] == "extra_forbidden":
        return f"the field {where!r} is not known here; leave it out"
    if fault["type"] == "missing":
        return f"the field {where!r} is required"
    told = None if fault["type"] == "string_too_long" else _UNIONS.get(where.partition(".")[0])
    message = told or fault["msg"].removeprefix("Value error, ")
    return f"{where or 'the body'}: {message[:1].lower()}{message[1:]} (given: {_shown(fault['input'])})"


def _shown(value: Any) -> str:
    """The beginning of what a client sent."""
    try:
        return msgspec.json.encode(_begun(value))[:60].decode(errors="replace")
    except RecursionError:
        return "something nested deeply"


def _begun(value: Any) -> Any:
    """As much of a value as is shown of it: the beginnings of its texts, and its first items."""
    if isinstance(value, str):
        return value[:60]
    if isinstance(value, list):
        return [_begun(item) for item in value[:30]]
    if isinstance(value, dict):
        return {name[:60]: _begun(value[name]) for name in itertools.islice(value, 15)}
    return value
