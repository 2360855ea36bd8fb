"""What the served precision costs: its perplexity beside float32's on the same weights (`python -m bench.quality`).

Knows a checkpoint, its tokenizer and a text file; every next token of the first `--tokens` is scored with the full
context before it. Prints one JSON line.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import torch

from app import catalog, settings
from app.text.tokenizer import load_tokenizer
from bench.driving import Course, Driver
from model.checkpoint import load
from model.decoder.kernels.select import choose

TEXT = Path(__file__).parents[2] / "shared" / "data" / "pride_and_prejudice.txt"


def perplexity(path: Path, ids: list[int], dtype: str, chunk: int = 256) -> float:
    """exp of the mean negative log-likelihood of ids[1:], in a decoder of this dtype."""
    backend = choose("cpu", dtype, "cpu")
    decoder = load(path, backend=backend).decoder
    driver, course = Driver(decoder, backend, len(ids) + chunk), Course()
    total = 0.0
    for start in range(0, len(ids) - 1, chunk):
        part = ids[start : min(start + chunk, len(ids) - 1)]
        logits = driver.run(driver.prepare([(course, part)], all_rows=True))
        following = torch.tensor(ids[start + 1 : start + 1 + len(part)])
        scores = logits.double().log_softmax(dim=1).gather(1, following.unsqueeze(1))
        total -= float(scores.sum())
    return math.exp(total / (len(ids) - 1))


def main() -> int:
    """Compare; exit code 1 when the served precision costs more than one percent."""
    parser = argparse.ArgumentParser(description="Perplexity of the served precision against float32.")
    parser.add_argument("--model", default=settings.DEFAULT_MODEL)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=8000)
    options = parser.parse_args()
    path = catalog.resolve(options.model, settings.default_cache()).path
    text = options.text.read_text(encoding="utf-8")[: options.tokens * 8]
    ids = load_tokenizer(path).encode(text, add_special=False)[: options.tokens]
    figures = {}
    for dtype in ("auto", "float32"):
        start = time.perf_counter()
        figures[dtype] = perplexity(path, ids, dtype)
        print(f"{dtype}: {figures[dtype]:.4f} in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    worse = figures["auto"] / figures["float32"] - 1
    answer = {"tokens": len(ids), "served": figures["auto"], "float32": figures["float32"], "worse": worse}
    print(json.dumps(answer))
    return int(worse > 0.01)


if __name__ == "__main__":
    sys.exit(main())
