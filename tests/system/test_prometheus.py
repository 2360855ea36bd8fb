"""A real Prometheus scrapes a live server: target up, rules loaded, and every dashboard query answers under load.

Needs the programs `prometheus` and `promtool`; in CI they must be there, elsewhere the tests say that they are not.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
DOCKER = ROOT / "docker"
DASHBOARD = json.loads((DOCKER / "grafana" / "dashboards" / "everstream.json").read_text())
QUERIES = [
    (panel["title"], target["expr"])
    for panel in DASHBOARD["panels"]
    if panel["type"] != "row"
    for target in panel["targets"]
]


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None and "CI" not in os.environ:
        pytest.skip(f"{name} is not installed (Debian: apt-get install prometheus)")
    assert found, f"CI must have {name}"
    return found


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], Any], seconds: float, what: str, process: subprocess.Popen, log: Path) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert process.poll() is None, f"{what}: the process ended.\n{log.read_text()[-2000:]}"
        try:
            if answer := condition():
                return answer
        except (OSError, httpx.HTTPError):
            pass
        time.sleep(0.2)
    raise AssertionError(f"{what}: not within {seconds} s.\n{log.read_text()[-2000:]}")


@pytest.fixture(scope="module")
def server(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port, log = unused_port(), tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "app", "serve", "--port", str(port), "--max-waiting", "4", "--max-sequences", "4"]
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: httpx.get(f"{url}/health/ready").status_code == 200, 90, "the server", process, log)
        yield url
    finally:
        process.terminate()
        process.wait(40)


@pytest.fixture(scope="module")
def load(server: str) -> Iterator[None]:
    """Requests of every kind that the dashboard shows, until the tests are over."""
    stop = threading.Event()
    retention = {"policy": "sinks", "sink_tokens": 4, "window": 64}
    story = {
        "model": "smollm2-135m-instruct",
        "prompt": "Once upon a time " * 12,
        "max_tokens": 100,
        "ignore_eos": True,
    }
    kinds = [
        ("/v1/completions", {**story, "max_tokens": 24}),
        ("/v1/completions", {**story, "retention": retention}),
        ("/v1/completions", {**story, "temperature": 99}),
        ("/nowhere", {}),
    ]

    def client(number: int) -> None:
        with httpx.Client(base_url=server, timeout=60) as http:
            while not stop.is_set():
                path, body = kinds[number % len(kinds)]
                http.post(path, json=body)
                number += 1

    threads = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(10)]
    for thread in threads:
        thread.start()
    yield
    stop.set()
    for thread in threads:
        thread.join(60)


@pytest.fixture(scope="module")
def prometheus(server: str, load: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """Our own configuration with this server's address in place of the compose file's, scraped each second."""
    binary, folder, port = program("prometheus"), tmp_path_factory.mktemp("prometheus"), unused_port()
    configuration = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
    configuration["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    configuration["rule_files"] = [str(DOCKER / name) for name in configuration["rule_files"]]
    (job,) = configuration["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["server:8000"]}]
    job["static_configs"] = [{"targets": [server.removeprefix("http://")]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    log = folder / "log"
    command = [binary, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with log.open("w") as out:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=out, stderr=out)

    def get(path: str, **parameters: str) -> Any:
        address = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(address, timeout=10) as answer:
            return json.load(answer)["data"]

    def wait_for(condition: Callable[[], Any], seconds: float, what: str) -> Any:
        return until(condition, seconds, what, process, log)

    wait_for(lambda: get("targets"), 30, "prometheus")
    yield SimpleNamespace(get=get, until=wait_for)
    process.terminate()
    process.wait(20)


def test_the_rules_pass_promtool() -> None:
    promtool = program("promtool")
    commands = [
        ("check", "config", DOCKER / "prometheus.yml"),
        ("check", "rules", DOCKER / "alerts.yml"),
        ("test", "rules", ROOT / "tests" / "system" / "alerts_test.yml"),
    ]
    for command in commands:
        done = subprocess.run([promtool, *map(str, command)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_all_targets_are_up(prometheus: SimpleNamespace) -> None:
    def healths() -> list[str]:
        return [target["health"] for target in prometheus.get("targets")["activeTargets"]]

    prometheus.until(lambda: healths() == ["up"], 30, "the target is up")


def test_all_rules_are_loaded_and_can_be_evaluated(prometheus: SimpleNamespace) -> None:
    def rules() -> list[dict]:
        return [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]

    prometheus.until(lambda: rules() and all(rule["health"] == "ok" for rule in rules()), 30, "the rules are evaluated")
    declared = [rule["alert"] for rule in yaml.safe_load((DOCKER / "alerts.yml").read_text())["groups"][0]["rules"]]
    assert [rule["name"] for rule in rules()] == declared
    assert [rule["name"] for rule in rules() if rule["state"] == "firing"] == []


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=[f"{n}-{title}" for n, (title, _) in enumerate(QUERIES)])
def test_every_dashboard_query_returns_series_under_load(prometheus: SimpleNamespace, title: str, query: str) -> None:
    asked = query.replace("$__rate_interval", "10s")

    def values() -> list[str]:
        series = prometheus.get("query", query=asked)["result"]
        return [one["value"][1] for one in series if one["value"][1] not in ("NaN", "+Inf", "-Inf")]

    assert prometheus.until(values, 60, f"{title}: {asked}")
