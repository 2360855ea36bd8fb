"""Every Prometheus object of the service, in one file, and the calls that feed them.

Knows metric names and how to count; does not know who calls. Request counters are taken once, at finish;
worker counters add up over worker lives, so a restart neither loses nor repeats. Names: README, "Metrics".
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from app.live import LiveFeed
from model.protocol import SamplingParams, Stats, Step

PREFIX = "everstream_"
LATENCY = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3),
    *(0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0),
)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 1048576)
_COUNTERS = {
    "prompt_tokens_computed": ("prompt_tokens_computed", "Prompt tokens that workers computed (prefix hits excluded)."),
    "tokens_sampled": ("tokens_sampled", "Tokens that workers sampled, delivered or not."),
    "prefix_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "preemptions": ("num_preemptions", "Sequences preempted because KV blocks ran out."),
    "tokens_evicted": ("tokens_evicted", "Tokens that fell out of a retention window."),
    "replayed_tokens": ("replayed_tokens", "Tokens computed again after a preemption or a crash."),
    "pool_checks": ("kv_pool_checks", "Integrity checks of the block pool that passed."),
    "steps": ("engine_steps", "Engine steps."),
    "step_seconds": ("engine_step_seconds", "Seconds spent in engine steps."),
}
_GAUGES = {
    "running": ("num_requests_running", "Sequences in the batch."),
    "waiting": ("num_requests_waiting", "Sequences that wait."),
    "waiting_tokens": ("num_tokens_waiting", "Prompt tokens that wait."),
    "blocks_total": ("kv_blocks", "KV blocks there are."),
    "blocks_used": ("kv_blocks_used", "KV blocks held by sequences."),
    "blocks_cached": (
        "kv_blocks_cached",
        "KV blocks whose content a later prompt can reuse, held by sequences or free.",
    ),
    "resident_bytes": ("worker_resident_memory_bytes", "Resident memory of the worker processes."),
}


class Asked(Protocol):
    """The part of a request that is counted."""

    @property
    def params(self) -> SamplingParams: ...


class Used(Protocol):
    """A request's usage."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...


class Timed(Protocol):
    """When things happened to a request, `time.monotonic` seconds; 0.0 where they did not."""

    opened: float
    started: float
    first_token: float
    last_token: float
    ended: float


class Histogram(Collector):
    """A histogram for one thread: no lock, no walk through the buckets, since one value comes with each token."""

    def __init__(self, name: str, text: str, buckets: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(float(bound) for bound in buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        """Called at each scrape."""
        totals = accumulate(self._counts)
        bounds = (*self._bounds, float("inf"))
        names = [floatToGoString(bound) for bound in bounds]  # type: ignore[no-untyped-call]  # the library's own
        yield HistogramMetricFamily(self._name, self._text, list(zip(names, totals, strict=True)), self._sum)


class WorkerTotals(Collector):
    """Worker counters summed over all lives, and the gauges of the lives there are; read only when scraped."""

    def __init__(self) -> None:
        self._past: dict[str, float] = dict.fromkeys(_COUNTERS, 0.0)
        self._now: dict[int, Stats] = {}

    def seen(self, slot: int, stats: Stats) -> None:
        """The latest counters of the life in this slot."""
        self._now[slot] = stats

    def ended(self, slot: int) -> None:
        """That life is over: its counters belong to the past, its gauges are gone."""
        stats = self._now.pop(slot, None)
        if stats is not None:
            for name in _COUNTERS:
                self._past[name] += getattr(stats, name)

    def total(self, name: str) -> float:
        """One counter of `Stats` over all lives."""
        return self._past[name] + sum(float(getattr(stats, name)) for stats in self._now.values())

    def collect(self) -> Iterator[Metric]:
        """Called at each scrape."""
        for name, (metric, text) in _COUNTERS.items():
            yield CounterMetricFamily(PREFIX + metric, text, value=self.total(name))
        live = self._now.values()
        for name, (metric, text) in _GAUGES.items():
            yield GaugeMetricFamily(PREFIX + metric, text, value=sum(getattr(stats, name) for stats in live))
        total = sum(stats.blocks_total for stats in live)
        used = sum(stats.blocks_used for stats in live)
        text = "Share of the KV blocks that sequences hold, 0 to 1."
        yield GaugeMetricFamily(PREFIX + "kv_cache_usage_perc", text, value=used / total if total else 0.0)


class Metrics:
    """One registry with all metrics of one service; it is the observer of the service and of the supervisor."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they double the page and nobody asks for them
        self.registry = CollectorRegistry()
        self.live = LiveFeed()
        self.totals = WorkerTotals()
        self.registry.register(self.totals)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests.")
        self.generation_tokens = self._counter("generation_tokens", "Output tokens delivered by finished requests.")
        self.success = self._counter("request_success", "Finished requests.", "finished_reason")
        for reason in ("stop", "length", "abort", "error"):
            self.success.labels(reason)
        self.rejections = self._counter(
            "admission_rejections", "Requests refused at the door or given up in the queue.", "reason"
        )
        self.restarts = self._counter("worker_restarts", "Workers that were started anew.")
        self.resumes = self._counter("streams_resumed", "Streams taken up again after a worker died.")
        self.poison = self._counter("requests_poisoned", "Requests ended because they seem to kill workers.")
        self.http = self._counter("http_requests", "HTTP requests.", "route", "method", "status")
        self.first = self._histogram("time_to_first_token_seconds", "From request to first token.")
        self.gap = self._histogram("inter_token_latency_seconds", "Between two deliveries to one choice.")
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean seconds a token after the first, one value a request."
        )
        self.whole = self._histogram("e2e_request_latency_seconds", "From request to last word.")
        self.queue = self._histogram(
            "request_queue_time_seconds", "From request to first step, or to an end without one."
        )
        self.prefill = self._histogram("request_prefill_time_seconds", "From the first step to the first token.")
        self.decode = self._histogram("request_decode_time_seconds", "From the first token to the last.")
        self.prompt_size = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self.output_size = self._histogram("request_generation_tokens", "Output tokens of a request.", TOKENS)
        self.step_tokens = self._histogram("iteration_tokens_total", "Tokens computed in one engine step.", TOKENS)
        self._measured("front_end_resident_memory_bytes", "Resident memory of the front end.", _resident_bytes)

    def _measured(self, name: str, text: str, measure: Callable[[], float]) -> None:
        Gauge(PREFIX + name, text, registry=self.registry).set_function(measure)

    def watch(self, num_open: Callable[[], int], num_queued: Callable[[], int], num_ready: Callable[[], int]) -> None:
        """Show what is counted elsewhere: open streams, those no step has worked on yet, workers that are up."""
        self._measured("workers_ready", "Workers that are up.", num_ready)
        self._measured("streams_open", "Streams that are open.", num_open)
        self._measured("streams_queued", "Streams that no step has worked on yet.", num_queued)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = LATENCY) -> Histogram:
        histogram = Histogram(PREFIX + name, text, buckets)
        self.registry.register(histogram)
        return histogram

    def text(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self.registry)

    def token_gap(self, seconds: float, now: float) -> None:
        """Two deliveries to one choice, this far apart, the second one at `now` (`time.monotonic`)."""
        self.gap.observe(seconds)
        self.live.gaps.append((now, seconds))

    def first_token(self, seconds: float, now: float) -> None:
        """A request's first token, this long after the request, at `now` (`time.monotonic`)."""
        self.first.observe(seconds)
        self.live.first_tokens.append((now, seconds))

    def resumed(self) -> None:
        """A stream is taken up again."""
        self.resumes.inc()
        self.live.resumed += 1

    def poisoned(self) -> None:
        """A request was given up because it ended two workers."""
        self.poison.inc()
        self.live.poisoned += 1

    def rejected(self, reason: str) -> None:
        """A request was refused before its stream began, or given up in the queue."""
        self.rejections.labels(reason).inc()
        self.live.rejected += 1

    def finished(self, asked: Asked, usage: Used, timings: Timed, reason: str) -> None:
        """A request had its last word: the only place where its tokens are counted."""
        self.success.labels(reason).inc()
        self.prompt_tokens.inc(usage.prompt_tokens)
        self.generation_tokens.inc(usage.completion_tokens)
        self.prompt_size.observe(usage.prompt_tokens)
        self.output_size.observe(usage.completion_tokens)
        self.whole.observe(timings.ended - timings.opened)
        self.live.finished += 1
        self.live.tokens += usage.completion_tokens
        started = timings.started or timings.ended
        self.queue.observe(started - timings.opened)
        if timings.first_token:
            self.prefill.observe(timings.first_token - started)
            decode = timings.last_token - timings.first_token
            self.decode.observe(decode)
            if usage.completion_tokens > 1:
                self.per_token.observe(decode / (usage.completion_tokens - 1))

    def http_request(self, route: str, method: str, status: int) -> None:
        """An HTTP request was answered; `route` is the path as the code names it, so that its kinds are few."""
        self.http.labels(route, method, str(status)).inc()

    def worker_step(self, slot: int, step: Step, before: Stats) -> None:
        """One engine step of one worker; `before` are the counters before it."""
        stats = step.stats
        self.totals.seen(slot, stats)
        if stats.steps != before.steps:  # a message may also bring last words alone
            self.step_tokens.observe(stats.last_prefill_tokens + stats.last_decode_rows)
            self.live.step(slot, step)

    def worker_ended(self, slot: int) -> None:
        """A worker's life is over."""
        self.totals.ended(slot)
        self.live.stats.pop(slot, None)

    def worker_restarted(self, slot: int) -> None:
        """A worker is started anew."""
        self.restarts.inc()
        self.live.restarts += 1


def _resident_bytes(page: int = 4096) -> float:
    """This process's resident memory, 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * page
    except (OSError, IndexError, ValueError):
        return 0.0
