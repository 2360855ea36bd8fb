"""Bodies too long to be read on the event loop: in a thread, one after another, and only as far as they can be valid.

Knows JSON as bytes. A small text can stand for a great many values, and making them takes the interpreter's lock and a
hundred bytes of memory each. So the fields are parted first without being read; then each is counted, and only what no
count refuses is read. What the values mean is the schemas' to say.
"""

import asyncio
import functools
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Raw, Struct

from app.api.errors import Invalid
from app.api.schemas import HARMLESS, NOT_HONOURED, Strict
from app.api.schemas_requests import (
    MAX_PROMPTS,
    MAX_STRINGS,
    MAX_TEXT,
    CompletionRequest,
    TokenizeRequest,
)

LONG = 1 << 15  # bytes; a shorter body is read on the loop: whatever is in it, that takes a few milliseconds
LONGEST_OTHER = 1 << 16  # bytes of JSON of a field that holds no prompt; what the limits allow of one is under 50,000
LONGEST_VARIABLES = 1 << 18  # bytes of JSON for the template's variables
NEUTRAL = 64  # bytes; no neutral value of a field that is not served is longer
MOST_WAITING = 256 << 20  # bytes of the bodies that wait for their turn
PORTION = 1 << 18  # bytes of ids that are read without letting go of the interpreter's lock

MESSAGE_NULLS = frozenset(("refusal", "annotations", "audio", "tool_calls", "function_call"))
"""What answers carry in their messages and say nothing with where it is null or empty."""

_LONGER: dict[str, tuple[Any, int]] = {
    "bad_words": (list[str], 2 << 20),
    "allowed_token_ids": (list[int], 2 << 20),
    "chat_template_kwargs": (Any, LONGEST_VARIABLES),
}
"""Fields that may be longer than others: what they are lists of, and their bytes, twice what their limits allow."""
_WANTED = {
    "prompt": f"a text, a list of token ids, or a list of at most {MAX_PROMPTS} of either",
    "tokens": "a list of token ids",
}
_HALF = re.compile(
    rb"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
"""An escape of JSON that is one half of a character beyond U+FFFF, without the other half."""
_IDS = b"0123456789-,[] \t\r\n"
_SPACE = b" \t\r\n"
_INNER = re.compile(rb"[\s,]*(\[[^\[\]]*\])")
_UNKNOWN = re.compile(r"unknown field `(.*)`", re.DOTALL)
_PLACE = re.compile(r"(.*?) - at `\$(.*)`", re.DOTALL)

Made = TypeVar("Made")


class Part(Struct, forbid_unknown_fields=True):
    """A piece of a message's content, as far as it must be known to bound its size."""

    type: Literal["text"]
    text: str


class Message(Struct, forbid_unknown_fields=True):
    """A message, as far as it must be known to bound its size: each of its values holds a text, or is one."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    refusal: str | list[str] | None = None
    annotations: list[str] | None = None
    audio: list[str] | None = None
    tool_calls: list[str] | None = None
    function_call: list[str] | None = None


class Turns:
    """Long bodies are read one after another, so that many at once neither fill the memory nor crowd the loop out."""

    def __init__(self, most: int = MOST_WAITING) -> None:
        """`most`: bytes of the bodies that may wait; beyond it they are refused."""
        self._thread = ThreadPoolExecutor(1, "long-body")
        self._most = most
        self._held = 0

    async def read(self, data: bytes, work: Callable[[bytes], Made]) -> Made:
        """What `work` makes of `data`. Raises Invalid (503) where too many wait; who goes away gives up his turn."""
        if self._held and self._held + len(data) > self._most:
            raise Invalid("too many large requests are being sent at once; try again", None, "overloaded", 503)
        self._held += len(data)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, data)
        finally:
            self._held -= len(data)


def fields_of(data: bytes, kind: type[Strict]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of a long body, and beside them those that need no further check: ids, all of them whole numbers.

    In their place among the fields stands a short list. Raises Invalid where a field has more of something than any
    request may have, or is unknown, or where the body is no JSON.
    """
    if strings(data) > 2 * MAX_STRINGS:
        said = f"the body holds more than {MAX_STRINGS} texts, names of fields included; send fewer messages or parts"
        raise Invalid(said, None, "invalid_value")
    fields: dict[str, Any] = {}
    ids: dict[str, Any] = {}
    for name, value in _parted(data, kind).items():
        if name in _WANTED:
            _prompt(value, name, kind, fields, ids)
        elif name == "messages" and value != b"null":
            fields[name] = _messages(value)
        elif name in NOT_HONOURED and len(value) > NEUTRAL:
            raise Invalid(f"the field {name!r} {NOT_HONOURED[name][1]}", name, "unsupported_parameter")
        elif name not in HARMLESS:
            fields[name] = _other(value, name)
    return fields, ids


def read(value: bytes, name: str | None = None, kind: Any = Any) -> Any:
    """JSON as values. `name`: the field it is of. Raises Invalid, or msgspec.ValidationError where it is no `kind`."""
    try:
        return msgspec.json.decode(value, type=kind)
    except msgspec.ValidationError as error:
        if kind is not Any and "out of range" not in str(error):
            raise
        # well-formed, but a number that no machine number can hold
        text = "a number is beyond the range of 64-bit floating point, or an integer has thousands of digits"
        raise Invalid(text, name, "invalid_value") from error
    except (msgspec.DecodeError, RecursionError) as error:
        half = _half_pair(value, str(error))
        if half:
            said = f"a text of the body holds half of a surrogate pair, {half}; send the whole character"
            raise Invalid(said, code="invalid_json") from error
        raise Invalid(f"the body is no valid JSON: {str(error)[:200]}", code="invalid_json") from error


def _half_pair(data: bytes, said: str) -> str | None:
    """The half of a surrogate pair that the JSON reader stopped at, as it is written; None where it was not that."""
    stopped = re.search(r"surrogate pair \(byte (\d+)\)", said)
    if stopped is None and "truncated" not in said:  # what it says where the other half would reach over the end
        return None
    place = int(stopped[1]) if stopped else len(data)
    half = _HALF.search(data[max(0, place - 32) : place + 16])
    return half[1].decode() if half else None


def _parted(data: bytes, kind: type[Strict]) -> dict[str, bytes]:
    """The fields' values as they are written; of a field that comes twice, the last. Raises Invalid."""
    try:
        parted = read(data, None, _struct(kind))
    except msgspec.ValidationError as error:
        unknown = _UNKNOWN.search(str(error))
        if unknown is None:
            raise Invalid("the body must be a JSON object", code="invalid_json") from error
        name = unknown[1][:200]
        raise Invalid(f"the field {name!r} is not known here; leave it out", name, "invalid_value") from error
    found = {name: bytes(getattr(parted, name)).strip(_SPACE) for name in parted.__struct_fields__}
    return {name: value for name, value in found.items() if value}


@functools.cache
def _struct(kind: type[Strict]) -> type[Struct]:
    names = dict.fromkeys((*kind.model_fields, *HARMLESS, *NOT_HONOURED))
    return msgspec.defstruct(kind.__name__, [(name, Raw, Raw(b"")) for name in names], forbid_unknown_fields=True)


def _other(value: bytes, name: str) -> Any:
    """A field that holds no prompt. Raises Invalid where it is longer than any good value of it."""
    kind, most = _LONGER.get(name, (Any, LONGEST_OTHER))
    if len(value) > most:
        said = f"{name}: {len(value)} bytes of JSON are over the limit of {most} for it"
        raise Invalid(said, name, "invalid_value")
    if value[:1] != b"[":
        return read(value, name)
    try:
        return read(value, name, kind)
    except msgspec.ValidationError as error:
        said = f"{name}: it must be a list of {'ids' if kind == list[int] else 'texts'}"
        raise Invalid(f"{said} (given: {_shown(value)})", name, "invalid_value") from error


def _prompt(value: bytes, name: str, kind: type[Strict], fields: dict[str, Any], ids: dict[str, Any]) -> None:
    """Reads a prompt into `fields`, or into `ids` where it is made of those."""
    first = value[:1]
    if name == "tokens" and first == b"[" and not value.translate(None, _IDS):
        if value.count(b",") >= MAX_TEXT:
            said = f"tokens: {value.count(b',') + 1} ids are over the limit of {MAX_TEXT}"
            raise Invalid(said, name, "invalid_value")
        fields[name], ids[name] = [0], _lists(value, name, most=0)
    elif kind is CompletionRequest and first == b"[" and not value.translate(None, _IDS):
        fields[name], ids[name] = [0], _lists(value, name, MAX_PROMPTS)
    elif kind is CompletionRequest and first == b"[":
        fields[name] = _texts(value, name)
    elif first == b'"' or len(value) <= NEUTRAL:
        fields[name] = read(value, name)
    else:
        raise _no_prompt(value, name, kind)


def _no_prompt(value: bytes, name: str, kind: type[Strict] = CompletionRequest) -> Invalid:
    wanted = "a text" if kind is TokenizeRequest else _WANTED[name]
    return Invalid(f"{name}: it must be {wanted} (given: {_shown(value)})", name, "invalid_value")


def _shown(value: bytes) -> str:
    return value[:60].decode(errors="replace")


def _texts(value: bytes, name: str) -> Any:
    if strings(value) > 2 * MAX_PROMPTS:
        raise _no_prompt(value, name)
    try:
        return read(value, name, list[str])
    except msgspec.ValidationError as error:
        raise _no_prompt(value, name) from error


def strings(value: bytes) -> int:
    """At least the number of strings, and at most twice that: quotes without those that follow a backslash.

    No string begins behind a backslash, so every beginning is counted; an end is where its text ends in no backslash.
    """
    return value.count(b'"') - value.count(b'\\"')


def _lists(value: bytes, name: str, most: int) -> list[Any]:
    """A list of ids, or one of at most `most` such lists; there are no other bytes in it than theirs."""
    lists = value.count(b"[") - 1
    if lists == 0:
        return _numbers(value, name)
    if lists > most:
        raise _no_prompt(value, name)
    found: list[list[int]] = []
    place = 1
    while inner := _INNER.match(value, place):
        found.append(_numbers(inner[1], name))
        place = inner.end()
    if value[place:].strip(_SPACE) != b"]":  # lists within lists, or numbers between them
        raise _no_prompt(value, name)
    return found


def _numbers(value: bytes, name: str) -> list[int]:
    """The numbers of one list, read in portions, between which others may run."""
    ids: list[int] = []
    start, end = 1, len(value) - 1
    while start < end:
        stop = value.find(b",", min(start + PORTION, end), end)
        stop = end if stop < 0 else stop
        ids += read(b"[%b]" % value[start:stop], name, list[int])
        start = stop + 1
    return ids


def _messages(value: bytes) -> Any:
    try:
        read(value, "messages", list[Message])
    except msgspec.ValidationError as error:
        told = _PLACE.fullmatch(str(error))
        said, where = (told[1], told[2]) if told else (str(error), "")
        path = ("messages" + where.replace("[", ".").replace("]", ""))[:200]
        place = path.split(".")
        if len(place) > 2 and place[2] in MESSAGE_NULLS:
            path = ".".join(place[:3])
            raise Invalid(f"the message's {place[2]!r} is not served yet", path, "unsupported") from error
        raise Invalid(f"{path}: {said[:1].lower()}{said[1:200]}", path, "invalid_value") from error
    return read(value, "messages")
