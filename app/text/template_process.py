"""Renders a model's chat template in a sandbox: `python -m app.text.template_process`, one process beside the server.

Reads frames of JSON from standard input and answers each on standard output: the template first, then conversations.
Templates come with models, from anywhere: a render may neither hang the server nor eat its memory, so it happens
here, under limits of address space and time, and this process ends with its parent.
"""

import datetime
import json
import resource
import signal
import struct
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO

from jinja2 import TemplateError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

HEADER = struct.Struct(">I")
ADDRESS_SPACE = 1 << 30
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


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


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
        """The conversation as one text. Raises TemplateError, and whatever the template does wrong."""
        for name in variables:
            if name in GIVEN or name in self._special_tokens or name not in self.variables:
                raise TemplateError(f"the template does not take the variable {name!r}")
        given = {"tools": None, "documents": None, **self._special_tokens, **variables}
        if not continue_final_message:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **given)
        last = str(messages[-1].get("content") or "")
        marked = [*messages[:-1], {**messages[-1], "content": last + _MARK}]
        text = self._template.render(messages=marked, add_generation_prompt=False, **given)
        place = text.rfind(_MARK.strip())
        if place < 0 or last.strip() not in text:
            raise TemplateError("the template does not show the last message as it is, so it cannot be continued")
        # A template that trims its messages also took the mark's last space: then the message's own end goes too.
        return text[:place] if text[place:].startswith(_MARK) else text[:place].rstrip()


def read_frame(source: BinaryIO) -> Any:
    """The next frame, or None at the end."""
    header = source.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    return json.loads(source.read(HEADER.unpack(header)[0]))


def frame(value: Any) -> bytes:
    """One frame, ready to write."""
    data = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
    return HEADER.pack(len(data)) + data


def _answer(renderer: Renderer, asked: Mapping[str, Any], seconds: float) -> dict[str, str]:
    # The alarm's default action ends the process, whatever a filter written in C is doing: the parent sees that.
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return {"text": renderer.render(**asked)}
    except TemplateError as error:
        return {"error": error.message or type(error).__name__}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> int:
    """Serve until standard input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    begin = read_frame(source)
    try:
        renderer = Renderer(begin["template"], begin["special_tokens"])
    except TemplateError as error:
        sink.write(frame({"error": f"it does not compile: {error.message}"}))
        sink.flush()
        return 1
    sink.write(frame({"text": ""}))
    sink.flush()
    while (asked := read_frame(source)) is not None:
        sink.write(frame(_answer(renderer, asked, begin["seconds"])))
        sink.flush()
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(main())
