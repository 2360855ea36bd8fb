"""Models that cannot be served: `serve` says why in one line and ends with a code that is not 0, whoever noticed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from app.supervisor import StartFailed, Supervisor
from model.config import EngineConfig
from model.protocol import Stats, Step
from tests.checkpoint.tiny_gguf import write_llama
from tests.system.harness import fake_command
from tests.tiny_text import write_tokenizer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_llama(path)
    return path


def serve(model: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "app", "serve", "--port", "0", "--model", str(model)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)


def refused(model: Path, *words: str) -> None:
    before = sorted(model.parent.rglob("*"))
    done = serve(model)
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode not in (0, None), done.stderr
    assert done.stdout == ""
    assert len(said) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "SIGKILL" not in said[0], said[0]
    for word in words:
        assert word in said[0], said[0]
    assert sorted(model.parent.rglob("*")) == before, "something was written beside the model"


@pytest.mark.parametrize("share", [0.0001, 0.1, 0.5, 0.999])
def test_a_truncated_file(tiny: Path, share: float) -> None:
    data = tiny.read_bytes()
    tiny.write_bytes(data[: int(len(data) * share)])
    refused(tiny, "tiny.gguf")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"retention": "sinks", "window": 8}, "--window 8 is under the least that the cache can keep, 16 tokens"),
        ({"retention": "sinks", "num_blocks": 8}, "the cache has 8; choose a shorter --window"),
    ],
)
def test_a_retention_that_the_model_cannot_honour(flags: dict[str, object], words: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "model")
    command = fake_command(tmp_path / "model", 0, flags, {})
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1
    assert done.stdout == "", "no banner"
    assert len(said) == 1, done.stderr
    assert words in said[0]
    assert "Traceback" not in done.stderr


def test_a_wrong_magic(tiny: Path) -> None:
    tiny.write_bytes(b"FUGG" + tiny.read_bytes()[4:])
    refused(tiny, "tiny.gguf")


def test_an_unknown_architecture(default_model: Path, tmp_path: Path) -> None:
    key, data = b"general.architecture", default_model.read_bytes()
    start = data.index(key) + len(key) + 4 + 8  # past the value's type and its length
    assert data[start : start + 5] == b"llama"
    path = tmp_path / "strange.gguf"
    path.write_bytes(data[:start] + b"lemma" + data[start + 5 :])
    refused(path, "strange.gguf", "lemma")


def test_a_folder_of_an_unknown_architecture(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "strange")
    config = {"model_type": "perceptron", "architectures": ["PerceptronForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, "perceptron")


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    refused(tmp_path / "bare", "bare", "tokenizer")


def test_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    path.touch()
    refused(path, "empty.gguf")


HANGS_UP = """
import json, socket, sys, time
door = socket.socket(socket.AF_UNIX)
door.connect(json.loads(sys.argv[1])["socket"])
print("the weights are damaged: pull them again", flush=True)
door.close()
time.sleep(0.4)
sys.exit({code})
"""


class Silence:
    """An observer."""

    def worker_step(self, slot: int, step: Step, before: Stats) -> None:
        """Nobody counts."""

    def worker_ended(self, slot: int) -> None:
        """Nobody counts."""

    def worker_restarted(self, slot: int) -> None:
        """Nobody counts."""


async def said(code: int) -> str:
    config = EngineConfig(model="m", name="m", socket="")
    supervisor = Supervisor([config], Silence(), command=(sys.executable, "-c", HANGS_UP.format(code=code)))
    with pytest.raises(StartFailed) as caught:
        await supervisor.start()
    await supervisor.stop()
    return str(caught.value)


async def test_a_worker_that_hangs_up_before_it_ends_is_quoted_not_killed() -> None:
    assert await said(3) == "the weights are damaged: pull them again"


async def test_a_worker_that_ends_by_a_fault_is_told_with_its_exit_code() -> None:
    assert await said(7) == (
        "the worker ended with exit code 7; its last line was: the weights are damaged: pull them again"
    )
