"""Names that dashboards know, counters over worker lives, and a feed of plain numbers."""

import json
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.api.live import Ticker
from app.metrics import LATENCY, Metrics
from model.protocol import Stats, Step

KNOWN = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prompt_tokens_total",
    "generation_tokens_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "request_success_total",
    "admission_rejections_total",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "iteration_tokens_total",
    "tokens_evicted_total",
    "worker_restarts_total",
    "streams_resumed_total",
    "requests_poisoned_total",
    "http_requests_total",
    "worker_resident_memory_bytes",
]


@pytest.fixture
def metrics():
    return Metrics()


def step(number, **stats):
    return Step(number, (), Stats(steps=number, **stats))


def test_every_known_name_is_there(metrics):
    metrics.rejected("queue_full")
    metrics.http_request("/x", "GET", 200)
    page = metrics.text().decode()
    samples = {s.name for family in text_string_to_metric_families(page) for s in family.samples}
    for name in KNOWN:
        full = f"everstream_{name}"
        assert full in samples or f"{full}_bucket" in samples, name


def test_latency_buckets_are_fine(metrics):
    assert LATENCY[0] == 0.001
    assert all(high / low < 2.01 for low, high in pairwise(LATENCY))
    metrics.first_token(0.0015, 0.0)
    value = metrics.registry.get_sample_value
    assert value("everstream_time_to_first_token_seconds_bucket", {"le": "0.001"}) == 0
    assert value("everstream_time_to_first_token_seconds_bucket", {"le": "0.002"}) == 1


def test_worker_counters_are_differences_per_life(metrics):
    value = metrics.registry.get_sample_value
    metrics.worker_step(0, step(1, tokens_sampled=10, preemptions=1, running=3), Stats())
    metrics.worker_step(1, step(1, tokens_sampled=5, running=2), Stats())
    assert value("everstream_tokens_sampled_total") == 15
    assert value("everstream_num_requests_running") == 5
    metrics.worker_ended(0)
    metrics.worker_restarted(0)
    assert value("everstream_tokens_sampled_total") == 15, "a restart does not lose"
    assert value("everstream_num_requests_running") == 2, "gauges of the dead are gone"
    metrics.worker_step(0, step(1, tokens_sampled=4), Stats())
    metrics.worker_step(0, step(2, tokens_sampled=6), Stats(tokens_sampled=4))
    assert value("everstream_tokens_sampled_total") == 21, "nor repeat"
    assert value("everstream_worker_restarts_total") == 1
    assert value("everstream_num_preemptions_total") == 1


def test_last_words_alone_are_no_step(metrics):
    metrics.worker_step(0, step(1, last_decode_rows=3), Stats())
    metrics.worker_step(0, step(1, last_decode_rows=3), Stats(steps=1))
    assert metrics.registry.get_sample_value("everstream_iteration_tokens_total_count") == 1


def test_cache_use_is_a_share(metrics):
    value = metrics.registry.get_sample_value
    assert value("everstream_kv_cache_usage_perc") == 0
    metrics.worker_step(0, step(1, blocks_total=100, blocks_used=25), Stats())
    assert value("everstream_kv_cache_usage_perc") == 0.25


def test_live_feed_is_json_and_bounded(metrics):
    for number in range(5000):
        metrics.worker_step(0, step(number + 1, last_prefill_tokens=7, last_decode_rows=3), Stats(steps=number))
        metrics.token_gap(number / 1000, time.monotonic())
        metrics.first_token(0.5, time.monotonic())
    feed = metrics.live.snapshot()
    json.dumps(feed)
    assert len(feed["steps"]) <= 600
    assert feed["steps"][-1]["number"] == feed["last_step"] == 5000
    assert feed["steps"][-1]["prefill_tokens"] == 7
    assert feed["first_token_seconds"] == {"p50": 0.5, "p90": 0.5, "p99": 0.5}
    assert feed["inter_token_seconds"]["p50"] == pytest.approx(3.0, abs=0.01)
    newer = metrics.live.snapshot(since_step=4990)
    assert [s["number"] for s in newer["steps"]] == list(range(4991, 5001))
    assert len(metrics.live.gaps) == 4000
    assert len(metrics.live.first_tokens) == 1000


def test_viewers_of_one_moment_share_its_snapshot(metrics, monkeypatch):
    def run(count):
        for number in range(count):
            metrics.worker_step(0, step(metrics.live.step_number + 1), Stats(steps=-1 - number))

    class Clock:
        now = 10.0

        def time(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr("app.api.live.asyncio.get_running_loop", lambda: clock)
    service = SimpleNamespace(status="ready", draining=False)
    ticker = Ticker(SimpleNamespace(live=metrics.live, service=service))
    run(300)
    (first, seen), numbers = ticker.event(100), []
    assert seen == 300
    run(5)
    assert ticker.event(100) == (first, 300), "the moment does not move on with the steps"
    late, seen_late = ticker.event(105)
    assert json.loads(late[6:])["last_step"] == seen_late == 300
    clock.now += 0.5
    run(2)
    again, seen = ticker.event(seen)
    assert ticker.event(seen_late)[0] is again, "from the second moment on all viewers get the same bytes"
    for data in (first, again):
        numbers += [each["number"] for each in json.loads(data[6:])["steps"]]
    assert numbers == list(range(101, 308))
    assert seen == 307


def test_live_feed_without_traffic(metrics):
    assert metrics.live.snapshot()["inter_token_seconds"] == {"p50": None, "p90": None, "p99": None}
