"""Spans of a request: their parts, their parent, and that nothing is imported while tracing is off."""

import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("opentelemetry.sdk", reason="traces are an optional extra")

from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from app.generation import ChoiceUsage, Generation, Timings, Usage
from app.metrics import Metrics
from app.tracing import Tracing
from model.protocol import Retention, SamplingParams

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def traced():
    exporter, metrics = InMemorySpanExporter(), Metrics()
    return Tracing(metrics, "m", "http://127.0.0.1:9", exporter), exporter, metrics


def finish(tracing, traceparent, reason="stop", first=True):
    timings = Timings()
    if first:
        timings.first_token, timings.last_token = timings.opened + 0.3, timings.opened + 0.9
        timings.started = timings.opened + 0.1
    timings.ended = timings.opened + 1.0
    usage = Usage(5, 7, 0, 0, (ChoiceUsage(7, 0),))
    generation = Generation("r", (1,) * 5, SamplingParams(), Retention(), traceparent=traceparent)
    tracing.finished(generation, usage, timings, reason)
    tracing.close()


def test_parts_lie_inside_the_whole_under_the_callers_span(traced):
    tracing, exporter, metrics = traced
    finish(tracing, PARENT)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"generate", "queue", "prefill", "decode", "stream"}
    whole = spans.pop("generate")
    assert f"{whole.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert f"{whole.parent.span_id:016x}" == "b7ad6b7169203331"
    assert whole.attributes["gen_ai.usage.output_tokens"] == 7
    for span in spans.values():
        assert span.parent.span_id == whole.context.span_id
        assert whole.start_time <= span.start_time <= span.end_time <= whole.end_time
    seconds = {name: (span.end_time - span.start_time) / 1e9 for name, span in spans.items()}
    assert seconds == pytest.approx({"queue": 0.1, "prefill": 0.2, "decode": 0.6, "stream": 0.7}, abs=1e-3)
    assert metrics.registry.get_sample_value("everstream_request_success_total", {"finished_reason": "stop"}) == 1


@pytest.mark.parametrize("traceparent", ["", "nonsense", "00-0-0-0"])
def test_without_a_usable_parent_a_trace_begins_here(traced, traceparent):
    tracing, exporter, _ = traced
    finish(tracing, traceparent, "error", first=False)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"generate", "queue"}
    assert spans["generate"].parent is None
    assert not spans["generate"].status.is_ok


class Stuck(SpanExporter):
    """A collector that does not answer."""

    def __init__(self):
        self.asked, self.let_go = threading.Event(), threading.Event()

    def export(self, spans):
        self.asked.set()
        self.let_go.wait(30)

    def shutdown(self):
        """Nothing to close."""


def test_a_collector_that_does_not_answer_holds_up_no_end():
    exporter = Stuck()
    tracing = Tracing(Metrics(), "m", "http://127.0.0.1:9", exporter)
    start = time.monotonic()
    finish(tracing, PARENT)
    assert exporter.asked.is_set()
    assert 1.9 < time.monotonic() - start < 3.0
    exporter.let_go.set()


def test_off_means_not_imported():
    code = "import app.main, sys; assert not [m for m in sys.modules if m.startswith('opentelemetry.sdk')]"
    subprocess.run([sys.executable, "-c", code], check=True)
