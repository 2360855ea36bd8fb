"""The command line as a person meets it: help, the banner, and failures that are one line and an exit code."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from app import banner, cli
from app.catalog import Source
from app.settings import DEFAULT_MODEL, Settings
from model.protocol import Ready

ROOT = Path(__file__).resolve().parent.parent.parent
READY = Ready(
    version=1, pid=1, model="smollm2-135m-instruct", family="llama", context=8192, vocabulary=49152, num_blocks=2912,
    block_size=16, max_sequences=64, token_budget=512, dtype="q4_1", device="cpu", kernels="cpu",
    policies=("none", "sinks", "window"), weight_bytes=97_000_000, cache_bytes=1 << 30, load_seconds=1.24,
)  # fmt: skip


def app(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "app", *arguments]
    given = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "COLUMNS": "100", **environment}
    return subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=60, check=False)


def test_help_names_every_command() -> None:
    done = app("--help")
    assert done.returncode == 0
    for command in ("serve", "pull", "chat", "bench", "inspect", "models"):
        assert f" {command} " in done.stdout
    assert "EVERSTREAM_" in done.stdout


def test_serves_help_explains_every_setting_that_is_a_flag() -> None:
    shown = " ".join(app("serve", "--help").stdout.replace("│", " ").split())
    for name, field in Settings.model_fields.items():
        flag = f"--{name.replace('_', '-')} "
        assert (flag in shown) == field.json_schema_extra["flag"], name
    assert "[default: 127.0.0.1]" in shown
    assert "[default: 1.0GiB]" in shown


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        (("serve", "--model", "nonsense"), {}, "error: There is no model 'nonsense'"),
        (("inspect", "nonsense"), {}, "error: There is no model 'nonsense'"),
        (("pull", "nonsense"), {}, "error: There is no model 'nonsense'"),
        (("serve", "--port", "70000"), {}, "error: --port is 70000: input should be less than or equal to 65535"),
        (("serve", "--retention", "sinks", "--window", "4"), {}, "error: sink_tokens (4) must be fewer than window"),
        (("serve",), {"EVERSTREAM_PORT": "x"}, "error: EVERSTREAM_PORT is 'x': "),
        (("serve",), {"EVERSTREAM_PROT": "1"}, "error: The environment variable EVERSTREAM_PROT is no setting"),
        (("chat", "--once", "hi", "--url", "http://127.0.0.1:9"), {}, "error: No server answers at http://127.0.0.1:9"),
        (("chat", "--once", "hi", "--url", "gopher://x"), {}, "error: 'gopher://x' is no address of a server"),
    ],
)
def test_failures_are_one_line_and_an_exit_code(
    arguments: tuple[str, ...], environment: dict[str, str], says: str
) -> None:
    done = app(*arguments, **environment)
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.startswith(says)
    assert done.stderr.count("\n") == 1


def test_a_wrong_flag_is_told_without_a_traceback() -> None:
    done = app("serve", "--nonsense", "1")
    assert done.returncode == 2
    assert "No such option" in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_hands_settings_to_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = tmp_path / "tiny.gguf"
    model.write_bytes(b"GGUF")
    from app import main  # here, since it loads the whole front end and the other tests do not need it

    seen: list[tuple] = []
    ended: list[str] = []

    def launch_all(configs):
        end = [lambda name=config.name: ended.append(name) for config in configs]
        return [SimpleNamespace(name=one.name, kill=do, close=do) for one, do in zip(configs, end, strict=True)]

    monkeypatch.setattr(cli.process, "launch_all", launch_all)
    monkeypatch.setattr(main, "serve", lambda *arguments: seen.append(arguments) or 7)
    code = cli.run(["serve", "--model", str(model), "--port", "0", "--no-resume", "--workers", "2", "--insecure"])
    assert code == 7
    ((chosen, configs, launched, revision),) = seen
    assert (chosen.port, chosen.resume, chosen.insecure, revision) == (0, False, True, "local")
    assert [config.name for config in configs] == ["tiny", "tiny"]
    assert [one.name for one in launched] == ["tiny", "tiny"]
    assert ended == ["tiny"] * 4, "killed and closed, however the server ended"


def printed(terminal: bool) -> str:
    out = io.StringIO()
    banner.print_banner(
        "http://127.0.0.1:8000",
        [READY],
        "llm==1",
        Console(file=out, width=100, force_terminal=terminal, soft_wrap=True),
    )
    return out.getvalue()


FACTS = (
    "http://127.0.0.1:8000",
    "smollm2-135m-instruct",
    "llama",
    "93 MiB of weights",
    "8,192 tokens",
    "endless with retention: sinks, window",
    "1.0 GiB, 2,912 blocks of 16 tokens (46,592 tokens)",
    "1.2 s",
)


@pytest.mark.parametrize("terminal", [True, False])
def test_the_banner_says_what_one_asks_first(terminal: bool) -> None:
    shown = printed(terminal)
    assert [fact for fact in FACTS if fact not in shown] == []


def test_the_banners_curl_line_has_a_place_for_the_key_where_one_is_asked_for() -> None:
    asked = banner.curl_line("http://127.0.0.1:8000", "m", asks_key=True)
    assert " -H 'Authorization: Bearer YOUR-KEY' " in asked
    assert "Authorization" not in banner.curl_line("http://127.0.0.1:8000", "m")
    out = io.StringIO()
    banner.print_banner("http://h:1", [READY], console=Console(file=out, soft_wrap=True), asks_key=True)
    assert "YOUR-KEY" in out.getvalue()


def test_the_banners_curl_line_stands_alone_on_its_line_and_holds_json() -> None:
    line = next(line for line in printed(True).splitlines() if line.startswith("curl"))
    assert json.loads(line.split(" -d '")[1].removesuffix("'"))["model"] == "smollm2-135m-instruct"


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1023, "1.0 KiB"),
        ((1 << 30) - 9000, "1.0 GiB"),
        (98_362_432, "94 MiB"),
        (3 << 40, "3.0 TiB"),
    ],
)
def test_bytes_in_words(count: int, words: str) -> None:
    assert banner.bytes_in_words(count) == words


def test_inspects_flag_is_known_to_its_help_and_needs_no_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "--json" in app("inspect", "--help").stdout
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(cli, "_process", lambda *arguments: asked.append(arguments) or 0)
    monkeypatch.setattr(cli, "obtain", lambda model, *_: Source(tmp_path / model, model, "local"))
    assert [cli.run(["inspect", "--json"]), cli.run(["inspect", "x", "--json"]), cli.run(["inspect"])] == [0, 0, 0]
    default = str(tmp_path / DEFAULT_MODEL)
    assert [arguments[1:] for arguments in asked] == [(default, "--json"), (str(tmp_path / "x"), "--json"), (default,)]


@pytest.mark.parametrize("command", [("app", "bench"), ("bench.serve",)])
def test_ctrl_c_ends_the_benchmark_quietly(command: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # says nothing, so that the benchmark waits
        listener.settimeout(60)
        given = [sys.executable, "-m", *command, "--url", f"http://127.0.0.1:{listener.getsockname()[1]}"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(given, cwd=ROOT, text=True, start_new_session=True, **pipes) as process:
            asking, _ = listener.accept()
            with asking:
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does
                said = process.communicate(timeout=30)
    assert (process.returncode, *said) == (130, "", "")


def test_a_benchmark_without_its_package_is_one_line() -> None:
    code = "import sys, runpy; sys.modules['aiohttp'] = None; runpy.run_module('bench.serve', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: the benchmark needs the package aiohttp")
    assert "make bench" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("seconds", [0.2, 0.5, 0.8, 1.1])
def test_a_signal_during_the_start_ends_it_without_a_traceback(number: int, seconds: float, tmp_path: Path) -> None:
    model = tmp_path / "tiny.gguf"
    model.write_bytes(b"GGUF")
    command = [sys.executable, "-m", "app", "serve", "--model", str(model), "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        time.sleep(seconds)
        process.send_signal(number)
        said, _ = process.communicate(timeout=30)
    assert process.returncode != 0
    assert "Traceback" not in said
