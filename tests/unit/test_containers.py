"""Container files against the code: variables are settings, what is mounted exists, the image runs without rights.

That the image builds and serves is docker/try_image.sh's to show; it needs root and minutes.
"""

import re
from pathlib import Path

import yaml

from app.settings import PREFIX, Settings

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SETTINGS = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}


def test_every_variable_is_a_setting() -> None:
    files = ("Dockerfile", "docker-compose.yml", "docker/README.md", "docker/try_image.sh", "docker/healthcheck.py")
    named = {word for file in files for word in re.findall(rf"{PREFIX}[A-Z_]+", (ROOT / file).read_text())}
    assert {"EVERSTREAM_HOST", "EVERSTREAM_API_KEYS"} <= named
    assert named <= SETTINGS, named - SETTINGS


def test_what_the_image_is_built_from_exists_and_is_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(\S+) \S+$", DOCKERFILE, re.M)
    assert len(copied) >= 4
    for source in copied:
        assert (ROOT / source).exists()
        assert source in kept


def test_the_last_stage_is_neither_root_nor_a_compiler() -> None:
    last = DOCKERFILE.split("\nFROM ")[-1]
    assert re.search(r"^USER 10001:10001$", last, re.M)
    assert "g++" not in last
    assert "HEALTHCHECK" in last
    assert re.search(r"^ARG BASE_IMAGE=", DOCKERFILE, re.M)
    assert re.search(r"^ARG TORCH_INDEX=$", DOCKERFILE, re.M)


def test_compose_mounts_what_is_there_and_publishes_to_the_loopback_address_alone() -> None:
    for service in COMPOSE["services"].values():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            assert (ROOT / source).exists() if source.startswith("./") else source in COMPOSE["volumes"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_compose_runs_the_service_without_rights() -> None:
    for name in ("everstream", "everstream-gpu"):
        service = COMPOSE["services"][name]
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "privileged" not in service
    assert COMPOSE["services"]["everstream-gpu"]["profiles"] == ["gpu"]
    assert {"prometheus", "grafana"} <= COMPOSE["services"].keys()


def test_grafana_finds_its_source_and_its_dashboard() -> None:
    folder = ROOT / "docker" / "grafana" / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["uid"] == "prometheus"
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((folder / "dashboards" / "everstream.yml").read_text())["providers"]
    targets = [mount.split(":")[1] for mount in COMPOSE["services"]["grafana"]["volumes"]]
    assert provider["options"]["path"] in targets
