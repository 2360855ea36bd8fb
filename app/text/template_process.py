"""Renders a model's chat template in a sandbox: `python -m app.text.template_process`, one process beside the server.

Reads frames of JSON from standard input and answers each on standard output: the template first, then conversations.
An answer is one letter, TEXT, REFUSED or UNKNOWN_VARIABLE, and a text in UTF-8: the conversation's, or why there is
none. Templates come with models, from anywhere: neither compiling nor rendering one may hang the server or eat its
memory, so both happen here, under limits of address space, time and length, and this process ends with its parent.
"""

import datetime
import functools
import json
import resource
import signal
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from jinja2 import TemplateError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

HEADER = struct.Struct(">I")
ADDRESS_SPACE = 1 << 30
LONGEST_TEXT = 1 << 20
"""Bytes of UTF-8 of the longest text that is rendered or encoded: encoding takes up to 400 bytes of memory a byte."""
LONGEST_REASON = 1000
"""Characters of a template's own words that are told."""
LONGEST_ANSWER = 1 + LONGEST_TEXT
TEXT, REFUSED, UNKNOWN_VARIABLE = b"t", b"r", b"v"
GIVEN = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
_MARK = "@@everstream-goes-on-here@@ "


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}` marks an assistant's words for training; here it only shows them."""

    tags = {"generation"}  # noqa: RUF012 # the base class reads a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """jinja2's namespace without names that begin with an underscore, which could reach into the interpreter."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace may not hold the name {name!r}")
        super().__setitem__(name, value)


class UnknownVariable(TemplateError):
    """A conversation brings a variable that the template does not read."""


class TooLong(TemplateError):
    """The rendered text is over LONGEST_TEXT."""

    def __init__(self) -> None:
        super().__init__(f"the conversation as the model's template writes it is over {LONGEST_TEXT} bytes; shorten it")


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message)[:LONGEST_REASON])


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


class Renderer:
    """One template, compiled with the globals, filters and white space rules that `transformers` gives it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises jinja2.TemplateError where the template does not compile."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "namespace": _Namespace,
            "dict": _new_dict,
        }
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)
        self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The conversation as one text of at most LONGEST_TEXT bytes.

        Raises UnknownVariable, TooLong, other TemplateErrors, and whatever the template does wrong.
        """
        for name in variables:
            if name in GIVEN or name in self._special_tokens or name not in self.variables:
                raise UnknownVariable(f"the template does not take the variable {name[:100]!r}")
        given = {"tools": None, "documents": None, **self._special_tokens, **variables}
        if not continue_final_message:
            return self._text(messages=messages, add_generation_prompt=add_generation_prompt, **given)
        last = str(messages[-1].get("content") or "")
        marked = [*messages[:-1], {**messages[-1], "content": last + _MARK}]
        text = self._text(messages=marked, add_generation_prompt=False, **given)
        place = text.rfind(_MARK.strip())
        if place < 0 or last.strip() not in text:
            raise TemplateError("the template does not show the last message as it is, so it cannot be continued")
        # A template that trims its messages also took the mark's last space: then the message's own end goes too.
        return text[:place] if text[place:].startswith(_MARK) else text[:place].rstrip()

    def _text(self, **given: Any) -> str:
        """What the template writes, dropped as soon as it is too long."""
        parts: list[str] = []
        left = LONGEST_TEXT
        for part in self._template.generate(**given):
            left -= len(part)
            if left < 0:
                raise TooLong
            parts.append(part)
        text = "".join(parts)
        if not text.isascii() and len(text.encode("utf-8", "replace")) > LONGEST_TEXT:
            raise TooLong
        return text


def read_frame(source: BinaryIO) -> bytes | None:
    """The next frame, or None at the end."""
    header = source.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    return source.read(HEADER.unpack(header)[0])


def frame(value: Any) -> bytes:
    """One frame of JSON, ready to write. Raises RecursionError for what is nested too deeply."""
    return _framed(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


def _framed(data: bytes) -> bytes:
    return HEADER.pack(len(data)) + data


def _answer(work: Callable[[], str], doing: str, seconds: float) -> bytes:
    """What `work` makes, or a sentence why it fails; always short enough. `doing`: what the sentence begins with."""
    # The alarm's default action ends the process, whatever a filter written in C is doing: the parent sees that.
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return TEXT + work().encode("utf-8", "replace")
    except UnknownVariable as error:
        return UNKNOWN_VARIABLE + _said(error).encode("utf-8", "replace")
    except TooLong as error:
        return REFUSED + _said(error).encode()
    except MemoryError:
        return REFUSED + f"{doing}: it takes more than {ADDRESS_SPACE >> 30} GiB of memory".encode()
    except RecursionError:
        return REFUSED + f"{doing}: it is nested too deeply, or calls itself without an end".encode()
    except Exception as error:
        return REFUSED + f"{doing}: {_said(error)}".encode("utf-8", "replace")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _said(error: Exception) -> str:
    name = type(error).__name__
    try:
        return ((error.message if isinstance(error, TemplateError) else f"{name}: {error}") or name)[:LONGEST_REASON]
    except (MemoryError, RecursionError):  # of the text of the error itself
        return name


def main() -> int:
    """Serve until standard input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    begin = json.loads(read_frame(source) or b"{}")
    seconds = begin["seconds"]
    renderer: Renderer | None = None

    def compiled() -> str:
        nonlocal renderer
        renderer = Renderer(begin["template"], begin["special_tokens"])
        return ""

    answer = _answer(compiled, "the model's chat template does not compile", seconds)
    sink.write(_framed(answer))
    sink.flush()
    while renderer is not None and (asked := read_frame(source)) is not None:
        rendered = functools.partial(_rendered, renderer, asked)
        sink.write(_framed(_answer(rendered, "the model's chat template refuses", seconds)))
        sink.flush()
    return 0


def _rendered(renderer: Renderer, asked: bytes) -> str:
    return renderer.render(**json.loads(asked))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(main())
