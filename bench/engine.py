"""What a step costs beside the arithmetic: `python -m bench.engine`.

Runs the engine with a decoder and a sampler that do nothing, so that what is left is planning, building the batch,
committing, and encoding the message for the socket. Knows the engine's parts; no model and no text.
"""

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from model.decoder.inputs import DecoderInput
from model.engine.admission import Limits
from model.engine.block_pool import BlockPool
from model.engine.engine import Engine
from model.engine.residence import Residence
from model.engine.runner import Runner
from model.engine.sampler import Sampled, SampleRow
from model.engine.scheduler import Scheduler
from model.engine.stats import Counters
from model.protocol import Retention, SamplingParams, Submit, TokenLogprob
from model.wire import encode

BLOCK_SIZE, NUM_BLOCKS, BUDGET = 16, 8192, 512


class Idle:
    """Backend, decoder and sampler in one, none of which does anything."""

    num_bytes = 0
    spec: Any = None

    def new_kv_store(self, spec: Any, num_blocks: int, block_size: int) -> "Idle":
        """Itself."""
        return self

    def copy_block(self, source: int, target: int) -> None:
        """Nothing."""

    def run(self, inputs: DecoderInput, store: Any) -> Tensor:
        """Rows without columns."""
        return torch.empty(inputs.logit_rows.shape[0], 0)

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
        """The same token for all."""
        return [Sampled(7) for _ in rows]

    def prompt_logprobs(self, logits: Tensor, next_ids: Sequence[int], count: int) -> list[TokenLogprob]:
        """None."""
        return []


def idle_engine(rows: int) -> Engine:
    """An engine around nothing."""
    idle: Any = Idle()
    counters = Counters()
    residence = Residence(BlockPool(NUM_BLOCKS), BLOCK_SIZE, (0,) * 30, counters)
    scheduler = Scheduler(residence, counters, BUDGET, rows)
    runner = Runner(idle, idle, idle, NUM_BLOCKS, BLOCK_SIZE, BUDGET + rows, rows)
    limits = Limits(50_000, 8192, NUM_BLOCKS, BLOCK_SIZE, 1024, 1 << 20, 1 << 30, ("none", "sinks"), {})
    return Engine(runner, residence, scheduler, counters, limits, (2,))


def measure(rows: int, retention: Retention, steps: int) -> float:
    """Median seconds of a decode step of so many rows, prompts of 512 tokens behind them."""
    engine = idle_engine(rows)
    params = SamplingParams(max_tokens=steps + 8, ignore_eos=True)
    for row in range(rows):
        engine.submit(Submit(f"cmpl-{row:032x}", 1, tuple(range(row, row + 512)), params, retention))
    while any(sequence.remaining > 1 for sequence in engine.scheduler.running) or engine.scheduler.num_waiting:
        engine.step()
    seconds = []
    for _ in range(steps):
        begun = time.perf_counter()
        for message in engine.step():
            encode(message)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def main() -> None:
    """Print microseconds a step."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--profile", action="store_true", help="where the time goes at 32 rows")
    arguments = parser.parse_args()
    for name, retention in (("none", Retention()), ("sinks", Retention("sinks", 4, 1020))):
        for rows in (1, 8, 32, 64):
            print(f"{name:6} {rows:3} rows  {1e6 * measure(rows, retention, arguments.steps):7.0f} us a step")
    if arguments.profile:
        profile = cProfile.Profile()
        profile.runcall(measure, 32, Retention(), arguments.steps)
        pstats.Stats(profile).sort_stats("tottime").print_stats(22)


if __name__ == "__main__":
    main()
