"""Optional traces over OTLP: for each request a span with its queue, prefill, decode and stream parts.

Knows OpenTelemetry and what the service tells its observer; imported only when an endpoint is set. Spans are made
at a request's end from the times already taken, so a stream costs nothing more while it runs.
"""

import threading
import time
from collections.abc import Callable

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from app.generation import Generation, ServiceObserver, Timings, Usage

TRACES_PATH = "/v1/traces"
FLUSH_SECONDS = 2.0


class Tracing:
    """An observer that writes spans and passes everything on to the next one."""

    def __init__(self, following: ServiceObserver, model: str, endpoint: str, exporter: SpanExporter | None = None):
        """`endpoint`: the collector's address, with or without `/v1/traces`; `exporter` stands in for it in tests."""
        address = endpoint if endpoint.endswith(TRACES_PATH) else endpoint.rstrip("/") + TRACES_PATH
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "everstream"}),
            shutdown_on_exit=False,  # it would wait for half a minute
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=address)))
        self._tracer = self._provider.get_tracer("everstream")
        self._model = model
        self._context = TraceContextTextMapPropagator()
        self.token_gap: Callable[[float, float], None] = following.token_gap
        self.first_token: Callable[[float, float], None] = following.first_token
        self.resumed: Callable[[], None] = following.resumed
        self.poisoned: Callable[[], None] = following.poisoned
        self.rejected: Callable[[str], None] = following.rejected
        self._finished = following.finished

    def finished(self, generation: Generation, usage: Usage, timings: Timings, reason: str) -> None:
        """Write the request's spans, under the caller's own where a `traceparent` came in."""
        self._finished(generation, usage, timings, reason)
        shift = time.time() - time.monotonic()

        def clock(moment: float) -> int:
            return int((moment + shift) * 1e9)

        parent = self._context.extract({"traceparent": generation.traceparent}) if generation.traceparent else None
        whole = self._tracer.start_span("generate", parent, SpanKind.SERVER, start_time=clock(timings.opened))
        whole.set_attributes(
            {
                "gen_ai.request.model": self._model,
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "everstream.cached_tokens": usage.cached_tokens,
                "everstream.tokens_evicted": usage.tokens_evicted,
                "everstream.request": generation.request_id,
                "everstream.finish_reason": reason,
            }
        )
        if reason == "error":
            whole.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(whole)
        for name, start, end in _parts(timings):
            self._part(name, inside, clock(start), clock(end))
        whole.end(clock(timings.ended))

    def _part(self, name: str, inside: Context, start: int, end: int) -> None:
        span: Span = self._tracer.start_span(name, inside, start_time=start)
        span.end(max(start, end))

    def close(self) -> None:
        """Send what is left, for two seconds at most: a collector that does not answer holds up no end."""
        flush = threading.Thread(target=self._provider.shutdown, name="trace-flush", daemon=True)
        flush.start()
        flush.join(FLUSH_SECONDS)


def _parts(timings: Timings) -> list[tuple[str, float, float]]:
    if not timings.first_token:
        return [("queue", timings.opened, timings.ended)]
    return [
        ("queue", timings.opened, timings.started),
        ("prefill", timings.started, timings.first_token),
        ("decode", timings.first_token, timings.last_token),
        ("stream", timings.first_token, timings.ended),
    ]
