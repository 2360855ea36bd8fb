"""Quality and constancy of endless streams, through the engine itself: `python -m bench.streaming COMMAND`.

`quality` (also without a command): perplexity of a long text under each policy, from prompt log-probabilities, and a
picture of it. `soak`: very long streams through a worker process: memory, blocks, time per token (streaming_soak).
`needles`: what a stream still knows of facts inside and outside its window (streaming_needles).
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from app import catalog, settings
from app.text.tokenizer import Tokenizer, load_tokenizer
from bench import streaming_needles, streaming_soak
from model.config import EngineConfig
from model.engine.engine import Engine
from model.protocol import Accepted, Retention, SamplingParams, Step, Submit
from model.worker import build

NOVEL = Path("..") / "shared" / "data" / "pride_and_prejudice.txt"
CHARACTERS = 86_016  # of the text's start, encoded and cut to TOKENS
TOKENS = 14_336
PART = 2_048
POLICIES = (
    ("4 sinks + 1,020 recent", Retention("sinks", 4, 1020), 21.763),
    ("1 sink + 1,023 recent", Retention("sinks", 1, 1023), 21.756),
    ("4 sinks + 508 recent", Retention("sinks", 4, 508), 22.462),
    ("1,024 recent, no sinks", Retention("window", 0, 1024), 34.597),
    ("everything kept", Retention("none"), 31.024),
)
TOLERANCE = {"float32": 0.005, "auto": 0.02}


@dataclass(frozen=True)
class Curve:
    """A policy's negative log-likelihoods, token by token."""

    name: str
    losses: list[float]

    @property
    def perplexity(self) -> float:
        """Of the whole text."""
        return math.exp(sum(self.losses) / len(self.losses))

    def parts(self, size: int = PART) -> list[float]:
        """Perplexity of each `size` tokens."""
        pieces = [self.losses[start : start + size] for start in range(0, len(self.losses), size)]
        return [math.exp(sum(piece) / len(piece)) for piece in pieces]


def read_ids(text: Path, tokenizer: Tokenizer, characters: int = CHARACTERS, tokens: int = TOKENS) -> tuple[int, ...]:
    """The text's first ids."""
    if not text.exists():
        raise SystemExit(f"{text} is not there: name a long plain text with --text (the figures are for one novel)")
    return tuple(tokenizer.encode(text.read_text(encoding="utf-8")[:characters], True)[:tokens])


def score(engine: Engine, ids: Sequence[int], policies: Sequence[tuple[str, Retention]]) -> list[Curve]:
    """Every next token's loss under each policy, all policies in one batch."""
    losses: dict[str, list[float]] = {name: [] for name, _ in policies}
    for name, retention in policies:
        params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0)
        answer = engine.submit(Submit(name, 1, tuple(ids), params, retention))
        if not isinstance(answer, Accepted):
            raise SystemExit(f"{name}: {answer.message}")
    while engine.has_work:
        for message in engine.step():
            if isinstance(message, Step):
                for row in message.rows:
                    losses[row.request] += [-one.logprob for one in row.prompt_logprobs]
                    if row.finish and sys.stderr.isatty():
                        print(f"  {row.request}: done", file=sys.stderr)
    return [Curve(name, losses[name]) for name, _ in policies]


def draw(curves: Sequence[Curve], context: int, out: Path, precision: str) -> None:
    """Perplexity against position, one line a policy."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.add_subplot()
    size = 512
    for curve in curves:
        values = curve.parts(size)
        positions = [size * (place + 1) for place in range(len(values))]
        axes.plot(positions, values, label=curve.name, linewidth=1.6)
    axes.axvline(context, color="grey", linestyle=":", linewidth=1)
    axes.text(context, axes.get_ylim()[1], " trained context", color="grey", va="top", fontsize=8)
    axes.set_yscale("log")
    axes.set_ylim(10, 400)
    axes.set_yticks([10, 20, 50, 100, 200, 400], labels=["10", "20", "50", "100", "200", "400"])
    axes.minorticks_off()
    axes.set_xlabel("position in the stream (tokens)")
    axes.set_ylabel(f"perplexity per {size} tokens")
    axes.set_title(f"Keeping sinks and a window, measured through the engine ({precision})", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    axes.grid(alpha=0.2)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None})


def quality(arguments: argparse.Namespace, model: Path) -> int:
    """Measure, print the table, draw; 1 where a figure is off."""
    config = EngineConfig(
        model=str(model),
        name=model.name,
        socket="",
        dtype=arguments.dtype,
        kernels=arguments.kernels,
        cache_bytes=3 << 30,
        max_waiting_tokens=1 << 30,
    )
    engine, ready = build(config, context_limit=2 * TOKENS)
    ids = read_ids(arguments.text, load_tokenizer(model), CHARACTERS, arguments.tokens)
    chosen = [row for row in POLICIES if arguments.policy is None or arguments.policy in row[0]]
    curves = score(engine, ids, [(name, retention) for name, retention, _ in chosen])
    allowed = TOLERANCE[arguments.dtype]
    print(f"perplexity of {len(ids)} tokens, {ready.dtype} on {ready.kernels}, trained context {ready.context}")
    wrong = 0
    for curve, (name, retention, known) in zip(curves, chosen, strict=True):
        off = curve.perplexity / known - 1
        held = arguments.dtype == "float32" or retention.policy == "sinks"
        bad = held and len(ids) == TOKENS and abs(off) > allowed
        wrong += bad
        parts = " ".join(f"{part:.2f}" for part in curve.parts())
        print(f"{name:26} {curve.perplexity:7.3f} ({off:+.2%}{' OFF' if bad else ''})  {parts}")
    if arguments.picture:
        draw(curves, ready.context, arguments.picture, ready.dtype)
        print(f"wrote {arguments.picture}")
    return min(wrong, 1)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and run; the exit code is 1 where a figure is not what it should be."""
    parser = argparse.ArgumentParser(prog="python -m bench.streaming", description=__doc__)
    parser.add_argument("--model", default=settings.DEFAULT_MODEL, help="catalog name, folder or .gguf file")
    parser.add_argument("--text", type=Path, default=NOVEL, help="a long plain text")
    parser.add_argument("--dtype", default="float32", choices=sorted(TOLERANCE), help="auto is the served precision")
    parser.add_argument("--kernels", default="auto", choices=("auto", "cpu", "reference"))
    commands = parser.add_subparsers(dest="command")
    first = commands.add_parser("quality", help="perplexity under each policy")
    for part in (parser, first):
        part.add_argument("--tokens", type=int, default=TOKENS)
        part.add_argument("--policy", help="only policies whose name holds this")
        part.add_argument("--picture", type=Path, help="where to write the picture, e.g. docs/streaming.svg")
    streaming_soak.add_arguments(commands.add_parser("soak", help="memory and speed of very long streams"))
    streaming_needles.add_arguments(commands.add_parser("needles", help="what a stream still knows"))
    arguments = parser.parse_args(argv)
    model = catalog.resolve(arguments.model, settings.default_cache()).path
    if arguments.command == "soak":
        return streaming_soak.run(arguments, model)
    if arguments.command == "needles":
        return streaming_needles.run(arguments, model, read_ids(arguments.text, load_tokenizer(model), 400_000, 90_000))
    return quality(arguments, model)


if __name__ == "__main__":
    sys.exit(main())
