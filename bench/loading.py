"""How fast checkpoints load and how much memory that takes: `python -m bench.loading`.

Writes a random Llama of about a billion parameters in bfloat16, reads it once into the page cache, then loads it in
a process of its own and watches that process's resident memory; the same for any model named with --model. Knows
files and /proc; what loading does is `model.checkpoint`'s business.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from model.checkpoint import CheckpointError, load
from model.decoder.kernels.select import choose


@dataclass(frozen=True)
class Size:
    """A Llama's sizes; the defaults make 1.01 billion parameters."""

    width: int = 2048
    wide: int = 5632
    layers: int = 20
    heads: int = 32
    kv_heads: int = 4
    vocabulary: int = 32000


def shapes(size: Size) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of a model, in the order in which folders keep them."""
    head_dim = size.width // size.heads
    yield "model.embed_tokens.weight", (size.vocabulary, size.width)
    for layer in range(size.layers):
        name = f"model.layers.{layer}."
        yield name + "input_layernorm.weight", (size.width,)
        yield name + "post_attention_layernorm.weight", (size.width,)
        yield name + "self_attn.q_proj.weight", (size.width, size.width)
        yield name + "self_attn.k_proj.weight", (size.kv_heads * head_dim, size.width)
        yield name + "self_attn.v_proj.weight", (size.kv_heads * head_dim, size.width)
        yield name + "self_attn.o_proj.weight", (size.width, size.width)
        yield name + "mlp.gate_proj.weight", (size.wide, size.width)
        yield name + "mlp.up_proj.weight", (size.wide, size.width)
        yield name + "mlp.down_proj.weight", (size.width, size.wide)
    yield "model.norm.weight", (size.width,)
    yield "lm_head.weight", (size.vocabulary, size.width)


def write_model(folder: Path, size: Size) -> None:
    """A model folder: config.json and one safetensors file, written tensor by tensor."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": size.vocabulary,
        "hidden_size": size.width,
        "intermediate_size": size.wide,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    header, place = {}, 0
    for name, shape in shapes(size):
        end = place + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [place, end]}
        place = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    generator = torch.Generator().manual_seed(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for _, shape in shapes(size):
            tensor = torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
            file.write(tensor.view(torch.uint8).numpy().tobytes())


def memory(key: str) -> int:
    """One line of /proc/self/status, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{key}:")[1].split()[0]) * 1024


def measure(path: str, dtype: str, kernels: str) -> dict[str, float]:
    """Load once in this process, which must have loaded nothing before. Seconds and bytes."""
    backend = choose("cpu", dtype, kernels, 0)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    started = time.perf_counter()
    loaded = load(path, backend=backend)
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "before": before,
        "peak": memory("VmHWM"),
        "after": memory("VmRSS"),
        "file_pages_after": memory("RssFile"),
        "weights": loaded.decoder.num_bytes,
    }


def measured_apart(path: Path, arguments: argparse.Namespace) -> list[dict[str, float]]:
    """`measure` in fresh processes, after the files were read once into the page cache."""
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        with file.open("rb") as opened:
            while opened.read(1 << 24):
                pass
    command = [sys.executable, "-m", "bench.loading", "--inside", str(path)]
    command += ["--dtype", arguments.dtype, "--kernels", arguments.kernels]
    runs = []
    for _ in range(arguments.runs):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise CheckpointError(done.stderr.strip().splitlines()[-1])
        runs.append(json.loads(done.stdout))
    return runs


def size_of(path: Path) -> int:
    """Bytes of the model's files."""
    return sum(file.stat().st_size for file in path.rglob("*")) if path.is_dir() else path.stat().st_size


def report(rows: list[tuple[str, int, list[dict[str, float]]]], as_json: bool) -> None:
    """A table with medians, or all figures as JSON."""
    if as_json:
        print(json.dumps([{"model": name, "bytes": size, "runs": runs} for name, size, runs in rows], indent=2))
        return
    columns = ("model", "files MB", "seconds", "weights MB", "peak MB", "peak growth / weights", "resident after MB")
    table = Table(*columns, title="Loading from a warm page cache, median of the runs")
    for name, size, runs in rows:
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        growth = (middle["peak"] - middle["before"]) / middle["weights"]
        figures = (size / 1e6, middle["seconds"], middle["weights"] / 1e6, middle["peak"] / 1e6, growth)
        shown = [f"{figure:,.2f}" for figure in (*figures, middle["after"] / 1e6)]
        table.add_row(name, *shown)
    Console().print(table)


def main(arguments: list[str] | None = None) -> int:
    """The command line; see --help."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.loading", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument(
        "--model", action="append", default=[], type=Path, help="a .gguf file or folder; may be repeated"
    )
    parser.add_argument("--no-billion", action="store_true", help="leave the random billion out")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    if parsed.inside:
        print(json.dumps(measure(parsed.inside, parsed.dtype, parsed.kernels)))
        return 0
    rows = [(path.name, size_of(path), measured_apart(path, parsed)) for path in parsed.model]
    if not parsed.no_billion:
        folder = Path(tempfile.mkdtemp(prefix="everstream-billion-"))
        try:
            write_model(folder, Size())
            rows.append(("random Llama, bfloat16", size_of(folder), measured_apart(folder, parsed)))
        finally:
            shutil.rmtree(folder)
    report(rows, parsed.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
