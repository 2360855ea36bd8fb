"""What sampling costs: `python -m bench.sampler`.

Two tables: CPU time a row for each control alone, over logits of the served vocabulary's size; and CPU-seconds a token
of whole engine steps, 32 rows that all differ in their controls against 32 greedy rows, in pairs. Knows the engine and
the sampler; no HTTP.
"""

import argparse
import random
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table

from app import catalog, settings
from app.text.tokenizer import load_tokenizer
from model.config import EngineConfig
from model.engine.engine import Engine
from model.engine.sampler import Sampler, SampleRow, SamplerState
from model.protocol import Cancel, SamplingParams, Submit
from model.worker import build

ROWS = 32
STEPS = 24
PAIRS = 10
PROMPT = "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of"

ALONE: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 1": SamplingParams(),
    "temperature 0.7, top_p 0.9": SamplingParams(temperature=0.7, top_p=0.9),
    "top_p 0.9": SamplingParams(top_p=0.9),
    "temperature 2, top_p 0.99": SamplingParams(temperature=2.0, top_p=0.99),
    "top_k 50": SamplingParams(top_k=50),
    "top_k 50, top_p 0.9": SamplingParams(top_k=50, top_p=0.9),
    "top_k 5000": SamplingParams(top_k=5000),
    "min_p 0.05": SamplingParams(min_p=0.05),
    "typical_p 0.9": SamplingParams(typical_p=0.9),
    "top_n_sigma 1": SamplingParams(top_n_sigma=1.0),
    "XTC": SamplingParams(xtc_probability=1.0),
    "dynamic temperature": SamplingParams(dynatemp_range=0.5),
    "three penalties": SamplingParams(repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1),
    "DRY over 8,192 tokens": SamplingParams(dry_multiplier=0.8),
    "logit_bias, 300 entries": SamplingParams(logit_bias=tuple((token, 1.0) for token in range(300))),
    "bad_words, 256": SamplingParams(bad_words=tuple((token, token + 1) for token in range(256))),
    "allowed_token_ids, 1,000": SamplingParams(allowed_token_ids=tuple(range(1000))),
    "greedy, 5 log-probabilities": SamplingParams(temperature=0.0, logprobs=5),
    "top_k 40, top_p 0.9, min_p 0.05, trace 10": SamplingParams(top_k=40, top_p=0.9, min_p=0.05, trace=10),
}


def different(count: int) -> list[SamplingParams]:
    """Controls of `count` rows, no two alike: each of the controls above, then mixtures of several."""
    rng = random.Random(7)
    found = [params for name, params in ALONE.items() if name != "greedy"]
    while len(found) < count:
        found.append(
            SamplingParams(
                temperature=rng.uniform(0.3, 1.6),
                top_k=rng.choice([0, 20, 40, 200]),
                top_p=rng.uniform(0.7, 0.99),
                min_p=rng.uniform(0.0, 0.1),
                typical_p=rng.choice([1.0, 0.9]),
                repetition_penalty=rng.uniform(1.0, 1.3),
                presence_penalty=rng.uniform(0.0, 0.5),
                dry_multiplier=rng.choice([0.0, 0.8]),
            )
        )
    return found[:count]


def per_row(vocabulary: int, repeats: int) -> list[tuple[str, float]]:
    """CPU-microseconds a row of each control alone; the best of `repeats`, since all else only adds."""
    sampler = Sampler(vocabulary, 1)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(ROWS, vocabulary, generator=generator) * 2.0
    likely = torch.rand(ROWS, vocabulary, generator=generator) < 0.003
    logits += likely * 9.0  # top_p 0.9 then keeps a few hundred, as it does on the default model's logits
    rng = random.Random(2)
    stream = [rng.randrange(300) for _ in range(9000)]
    results = []
    for name, params in ALONE.items():
        state = SamplerState.start(params, stream, stream[:300])
        rows = [SampleRow(params, state, 0, index) for index in range(ROWS)]
        times = []
        for _ in range(repeats):
            started = time.process_time()
            sampler.sample(logits, rows)
            times.append(time.process_time() - started)
        results.append((name, min(times) / ROWS * 1e6))
    return results


def per_token(engine: Engine, prompt: tuple[int, ...], controls: list[SamplingParams]) -> float:
    """CPU-seconds of the process a token, over steps in which every row decodes."""
    names = [f"row-{place}" for place in range(len(controls))]
    for place, (name, params) in enumerate(zip(names, controls, strict=True)):
        changed = {field: getattr(params, field) for field in params.__struct_fields__}
        changed |= {"max_tokens": 10 * STEPS, "ignore_eos": True, "seed": place}
        engine.submit(Submit(name, 0, (*prompt, place + 100), SamplingParams(**changed)))
    while engine.counters.last_decode_rows < len(controls):
        engine.step()
    before, started = engine.counters.tokens_sampled, time.process_time()
    for _ in range(STEPS):
        engine.step()
    seconds, tokens = time.process_time() - started, engine.counters.tokens_sampled - before
    for name in names:
        engine.cancel(Cancel(name))
    engine.step()
    engine.counters.last_decode_rows = 0
    return seconds / tokens


def paired(engine: Engine, prompt: tuple[int, ...], pairs: int) -> list[tuple[float, float]]:
    """(greedy, different) CPU-seconds a token of each pair; the order within a pair alternates."""
    greedy, mixed = [SamplingParams(temperature=0.0)] * ROWS, different(ROWS)
    per_token(engine, prompt, greedy)
    per_token(engine, prompt, mixed)
    results = []
    for pair in range(pairs):
        order = (greedy, mixed) if pair % 2 == 0 else (mixed, greedy)
        first, second = (per_token(engine, prompt, controls) for controls in order)
        results.append((first, second) if pair % 2 == 0 else (second, first))
    return results


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description="What sampling costs.")
    parser.add_argument("--model", default=settings.DEFAULT_MODEL, help="catalog name or local path")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    path = catalog.resolve(options.model, settings.default_cache()).path
    engine, ready = build(EngineConfig(model=str(path), name=options.model, socket="", threads=options.threads))
    console = Console()
    table = Table("control", "CPU µs a row", title=f"one row over {ready.vocabulary:,} logits")
    for name, microseconds in per_row(ready.vocabulary, 12):
        table.add_row(name, f"{microseconds:.0f}")
    console.print(table)
    prompt = tuple(load_tokenizer(path).encode(PROMPT, add_special=True))
    pairs = paired(engine, prompt, options.pairs)
    ratios = [mixed / greedy for greedy, mixed in pairs]
    greedy, mixed = (statistics.median(column) * 1e6 for column in zip(*pairs, strict=True))
    console.print(
        f"whole engine steps of {ROWS} rows, {options.pairs} pairs of {STEPS} steps, {ready.kernels}: "
        f"greedy {greedy:.0f}, all different {mixed:.0f} CPU µs a token; "
        f"ratio median {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    )


if __name__ == "__main__":
    main()
