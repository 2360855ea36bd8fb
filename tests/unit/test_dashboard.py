"""Dashboard and alert rules ask only for metrics that the service exposes, and divide sums by counts.

Reads the JSON and YAML under docker/ and the metric families of app.metrics; starts nothing.
"""

import json
import re
from pathlib import Path

import pytest

from app.metrics import PREFIX, Metrics

DOCKER = Path(__file__).resolve().parent.parent.parent / "docker"
DASHBOARD = json.loads((DOCKER / "grafana" / "dashboards" / "everstream.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
SELECTOR = re.compile(PREFIX + r"(\w+)\{([^}]*)\}")
ALERTS = (DOCKER / "alerts.yml").read_text()


WANTED = """
http_requests_total status=~"5.. e2e_request_latency_seconds_bucket time_to_first_token_seconds_bucket
inter_token_latency_seconds_bucket request_queue_time_seconds iteration_tokens_total tokens_sampled_total
kv_blocks_used prefix_cache_hits_total tokens_evicted_total num_preemptions_total admission_rejections_total
worker_restarts_total worker_resident_memory_bytes front_end_resident_memory_bytes
"""


def exposed() -> set[str]:
    """Every sample name that /metrics can show, labelled ones too that nobody has counted yet."""
    metrics = Metrics()
    metrics.watch(lambda: 0, lambda: 0, lambda: 0)
    suffixes = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    types = re.findall(r"^# TYPE (\w+) (\w+)$", metrics.text().decode(), re.M)
    return {name + suffix for name, kind in types for suffix in suffixes[kind]}


@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_a_panel_asks_only_for_metrics_that_exist(title: str, query: str) -> None:
    asked = set(re.findall(r"\beverstream_\w+", query))
    assert asked, f"{title} asks for no metric of ours"
    assert asked <= exposed(), f"{title}: {asked - exposed()} are not exposed"


def test_alerts_ask_only_for_metrics_that_exist() -> None:
    asked = set(re.findall(r"\beverstream_\w+", ALERTS))
    assert len(asked) >= 6
    assert asked <= exposed(), asked - exposed()


def test_labels_in_queries_exist() -> None:
    metrics = Metrics()
    metrics.rejected("queue_full")
    metrics.http_request("/x", "GET", 200)
    samples = re.findall(rf"^{PREFIX}(\w+)\{{(.*)\}} ", metrics.text().decode(), re.M)
    labels = {name: set(re.findall(r'(\w+)="', told)) for name, told in samples}
    asked = [found for text in (ALERTS, *dict(QUERIES).values()) for found in SELECTOR.findall(text)]
    assert len(asked) >= 4
    for name, selector in asked:
        assert set(re.findall(r"(\w+)=", selector)) <= labels[name], f"{name}{{{selector}}}"
        for reason in re.findall(r'finished_reason="(\w+)"', selector):
            assert f'everstream_{name}{{finished_reason="{reason}"}}' in metrics.text().decode()


def test_alerts_send_people_to_log_lines_that_exist() -> None:
    source = "".join(path.read_text() for path in (DOCKER.parent / "app").rglob("*.py"))
    events = re.findall(r'^ +action: .*?"([a-z ]+)"', ALERTS, re.M)
    assert {"request", "stream broken", "request poisoned"} <= set(events)
    for event in events:
        assert re.search(rf'log\.\w+\((level, )?"{event}', source), f"nobody logs {event!r}"


@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_counters_are_rated_and_means_are_sums_divided_by_counts(title: str, query: str) -> None:
    assert "avg(" not in query, f"{title}: a mean of means weighs a quiet server like a busy one"
    for name in re.findall(r"rate\((\w+)", query):
        assert name.endswith(("_total", "_bucket", "_sum", "_count")), f"{title} takes the rate of the gauge {name}"
    for name in re.findall(r"(\w+)_sum\[", query):
        assert f"/ sum(rate({name}_count[" in query, f"{title} does not divide {name}'s sum by its count"


def test_every_panel_says_what_it_shows() -> None:
    assert len(PANELS) >= 15
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        assert panel["description"]
        assert panel["datasource"]["uid"] == "prometheus"
        for target in panel["targets"]:
            assert target["legendFormat"]


def test_the_issues_panels_are_there() -> None:
    everything = " ".join(query for _, query in QUERIES)
    assert [name for name in WANTED.split() if name not in everything] == []


def test_the_docs_name_every_metric_and_its_kind() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| .+ \|$", (DOCKER.parent / "docs" / "metrics.md").read_text(), re.M)
    metrics = Metrics()
    metrics.watch(lambda: 0, lambda: 0, lambda: 0)
    types = re.findall(r"^# TYPE everstream_(\w+) (\w+)$", metrics.text().decode(), re.M)
    assert sorted(rows) == sorted(types)
