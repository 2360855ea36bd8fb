"""One JSON object a line on standard error, with the request's id; lines for people where that is a terminal.

Everything logs through the standard library; this file only decides how a line looks. A log that cannot be
written (a full disk) never stops the service. Prompts are logged by nobody unless Settings ask for it.
"""

import logging
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, TextIO

import structlog
from structlog.typing import Processor


def configure(level: str, stream: TextIO | None = None) -> None:
    """Send every log record of the process through one handler. Called once, by `app.main`."""
    stream = stream or sys.stderr
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer: Processor = structlog.processors.JSONRenderer(ensure_ascii=False, default=str)
    if stream.isatty():
        renderer = structlog.dev.ConsoleRenderer()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, _without_colours, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.raiseExceptions = False


def _without_colours(_: object, __: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    event.pop("color_message", None)
    return event
