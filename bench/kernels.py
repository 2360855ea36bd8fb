"""What the CPU kernels reach beside what the machine allows: `python -m bench.kernels [part ...]`.

Knows decoders, caches and a clock; no server, no sampling (that is `bench.serve`). Memory's speed is measured in
the same run, between the figures. Each figure is the median of several; one JSON line a figure, and a plot.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from app import catalog, settings
from bench.driving import Course, Driver
from model.checkpoint import load
from model.decoder.decoder import Decoder
from model.decoder.inputs import DecoderInput
from model.decoder.kernels import Backend, KVStore
from model.decoder.kernels.cpu import structs
from model.decoder.kernels.cpu.backend import CpuBackend, open_backend
from model.decoder.kernels.cpu.library import load_library
from model.decoder.kernels.reference import ReferenceBackend
from model.decoder.weights import BLOCK_BYTES, RawWeight
from model.families import llama

REPEATS = 5
DOCS = Path(__file__).parents[1] / "docs"
BILLION = {
    "hidden_size": 2048,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 5632,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "model_type": "llama",
}


def seconds(work: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Median time of `work`, after one warm-up."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def bandwidth() -> float:
    """Bytes a second that the pool reads from memory (256 MiB, more than any cache)."""
    library = load_library()
    if library is None:
        raise SystemExit("no CPU kernels on this machine")
    structs.declare(library)
    memory = torch.ones(1 << 28, dtype=torch.uint8)
    return memory.numel() / seconds(lambda: library.es_read_memory(memory.data_ptr(), memory.numel()))


def say(name: str, **figures: float) -> None:
    """One JSON line."""
    print(json.dumps({"figure": name, **{key: round(value, 4) for key, value in figures.items()}}), flush=True)


def random_weight(kind: str, out: int, inner: int) -> RawWeight:
    """A matrix of random bytes with small scales, as a checkpoint would hold it."""
    if kind == "BF16":
        return RawWeight(kind, (torch.randn(out, inner) * 0.02).to(torch.bfloat16), out, inner)
    weights, num_bytes = BLOCK_BYTES[kind]
    data = torch.randint(0, 256, (out, inner // weights, num_bytes), dtype=torch.uint8)
    scale = torch.tensor([0.002], dtype=torch.float16).view(torch.uint8)
    data[..., 0:2] = scale
    if kind in ("Q4_1", "Q5_1"):
        data[..., 2:4] = torch.tensor([-0.016], dtype=torch.float16).view(torch.uint8)
    return RawWeight(kind, data.flatten(1), out, inner)


def billion(backend: Backend, kind: str) -> Decoder:
    """A Llama of 1.1 billion random parameters, its products in `kind`."""
    decoder = Decoder(llama.spec(BILLION), backend)
    for parameter in decoder.parameters():
        if len(parameter.shape) == 2:
            decoder.fill(parameter.name, random_weight(kind, *parameter.shape))
        else:
            decoder.fill(parameter.name, torch.ones(parameter.shape))
    return decoder


def ids(count: int) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 30000, (count,), generator=generator).tolist()


def prefill(driver: Driver, tokens: int) -> float:
    """Seconds until the logits after a prompt of this length, in chunks of 512."""

    def once() -> None:
        course = Course()
        for start in range(0, tokens, 512):
            driver.run(driver.prepare([(course, ids(tokens)[start : start + 512])]))
        driver.give_back(course)

    return seconds(once, 3 if tokens > 512 else REPEATS)


def decode(driver: Driver, streams: int, context: int, steps: int = 15) -> float:
    """Seconds a step at this many streams of this context (its keys and values are not computed, only read)."""
    courses = [Course() for _ in range(streams)]
    for course in courses:
        driver.pretend(course, context)
    times = []
    for step in range(steps):
        inputs = driver.prepare([(course, [step + 5]) for course in courses])
        start_time = time.perf_counter()
        driver.run(inputs)
        times.append(time.perf_counter() - start_time)
    for course in courses:
        driver.give_back(course)
    return statistics.median(times)


class Product:
    """A decoder of one product, to time a kernel alone."""

    def __init__(self, backend: Backend, kind: str, out: int, inner: int) -> None:
        self.spec = llama.spec(BILLION)
        self._table = backend.pack(random_weight("BF16", 512, inner), lookup=True)
        self.weight = backend.pack(random_weight(kind, out, inner))
        self._backend = backend

    def run(self, inputs: DecoderInput, store: KVStore) -> torch.Tensor:
        """One step."""
        return self._backend.run(self, inputs, store)

    def forward(self, ops: Any) -> Any:
        """One product of the embedded rows."""
        return ops.linear(ops.select_rows(ops.embed(self._table, 1.0)), [self.weight], [None])


def products(backend: CpuBackend) -> None:
    """Each kind of weight at one row (against memory) and at many (against nothing but itself)."""
    out, inner = 49152, 1536
    for kind in ("Q4_1", "Q8_0", "BF16"):
        product = Product(backend, kind, out, inner)
        driver = Driver(product, backend, 1024)
        for rows in (1, 2, 4, 8, 32, 128, 512):
            course = Course()
            inputs = driver.prepare([(course, [7] * rows)], all_rows=True)
            took = seconds(partial(driver.run, inputs))
            driver.give_back(course)
            rate = product.weight.num_bytes / took
            say(
                f"{kind} x {rows} rows",
                ms=took * 1e3,
                GOPS=2e-9 * rows * out * inner / took,
                of_memory=rate / bandwidth(),
            )


def whole_decoder(
    decoder: Decoder, backend: CpuBackend, name: str, streams: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
) -> None:
    """A step at these numbers of streams, and prompts of 128 and 512 tokens."""
    driver = Driver(decoder, backend, 64 * 256)
    driver.soak()
    decode(driver, 1, 16, 1)
    for count in streams:
        took = decode(driver, count, 128)
        figures = {"ms": took * 1e3, "tokens_per_second": count / took}
        if count == 1:
            figures["of_memory"] = decoder.num_bytes / took / bandwidth()
        say(f"{name}: decode, {count} streams of 128", **figures)
    for tokens in (128, 512):
        took = prefill(driver, tokens)
        say(f"{name}: prompt of {tokens}", ms=took * 1e3, tokens_per_second=tokens / took)
    where(decoder, backend, driver, name)


def where(decoder: Decoder, backend: CpuBackend, driver: Driver, name: str) -> None:
    """The share of each kind of op in steps of 1 and of 32 streams, and in a prompt of 512."""
    for count in (1, 32):
        courses = [Course() for _ in range(count)]
        driver.run(driver.prepare([(course, ids(128)) for course in courses][:1]))
        backend.shares(decoder)
        for step in range(20):
            driver.run(driver.prepare([(course, [step + 5]) for course in courses]))
        say(f"{name}: where a step of {count} goes", **backend.shares(decoder))
        for course in courses:
            driver.give_back(course)
    backend.shares(decoder)
    prefill(driver, 512)
    say(f"{name}: where a prompt of 512 goes", **backend.shares(decoder))


def torch_bfloat16(path: Path) -> None:
    """The same prompt through torch's bfloat16 products."""
    torch.set_num_threads(2)
    backend = ReferenceBackend("cpu", "bfloat16")
    driver = Driver(load(path, backend=backend).decoder, backend, 1024)
    say("torch bfloat16: prompt of 512", ms=prefill(driver, 512) * 1e3)
    torch.set_num_threads(1)


def length(decoder: Decoder, backend: Backend) -> None:
    """Cost against context: first tokens, decode at 8 streams, and a plot of both."""
    driver = Driver(decoder, backend, 8 * 8200)
    driver.soak()
    first = {tokens: prefill(driver, tokens) * 1e3 for tokens in (128, 512, 1000, 2000, 4000)}
    for tokens, took in first.items():
        say(f"first token after {tokens}", ms=took)
    steps = {context: decode(driver, 8, context, 7) * 1e3 for context in (128, 1000, 2000, 4000, 8000)}
    for context, took in steps.items():
        say(
            f"decode, 8 streams of {context}",
            ms=took,
            of_memory=_cache_and_weights(decoder, 8, context) / took * 1e3 / bandwidth(),
        )
    streams = {count: decode(driver, count, 128, 9) * 1e3 for count in (1, 2, 4, 8, 16, 32, 64)}
    plot(first, steps, {count: count / took * 1e3 for count, took in streams.items()})


def _cache_and_weights(decoder: Decoder, streams: int, context: int) -> float:
    cached = sum(4 * layer.attention.kv_heads * layer.attention.head_dim for layer in decoder.spec.layers)
    return decoder.num_bytes + streams * context * cached


def plot(first: dict[int, float], steps: dict[int, float], rates: dict[int, float]) -> None:
    """docs/cost.svg."""
    figure = Figure(figsize=(12, 3.4))
    axes = figure.subplots(1, 3)
    for axis, data, title, across, up in (
        (axes[0], first, "First token", "prompt, tokens", "ms"),
        (axes[1], steps, "A step of 8 streams", "context, tokens", "ms"),
        (axes[2], rates, "Throughput", "streams", "tokens a second"),
    ):
        axis.plot(list(data), list(data.values()), marker="o")
        axis.set(title=title, xlabel=across, ylabel=up, ylim=(0, None))
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(DOCS / "cost.svg")


def main() -> int:
    """Run the parts named."""
    parser = argparse.ArgumentParser(description="Measure the CPU kernels.")
    parser.add_argument("parts", nargs="*", default=["products", "decoder", "length", "shapes"])
    parser.add_argument("--model", default=settings.DEFAULT_MODEL)
    options = parser.parse_args()
    backend = open_backend("auto")
    if backend is None:
        return 1
    say("memory", GBps=bandwidth() / 1e9, threads=backend.threads)
    path = catalog.resolve(options.model, settings.default_cache()).path
    if "products" in options.parts:
        products(backend)
    if "decoder" in options.parts:
        whole_decoder(load(path, backend=backend).decoder, backend, "default model")
        torch_bfloat16(path)
    if "length" in options.parts:
        length(load(path, backend=backend).decoder, backend)
    for kind in ("Q4_1", "BF16") if "shapes" in options.parts else ():
        whole_decoder(billion(backend, kind), backend, f"1.1 billion {kind}", (1, 8, 32))
    return 0


if __name__ == "__main__":
    sys.exit(main())
