"""Needles: a fact in a long text, and whether the stream still knows it at the end, inside and outside its window.

Each needle tells a person's colour among sentences of a novel; at the end ten colours are ranked by their
log-probability (the engine picks the best of ten allowed tokens). Knows the engine's protocol and one tokenizer.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from app.text.tokenizer import Tokenizer, load_tokenizer
from model.config import EngineConfig
from model.engine.engine import Engine
from model.protocol import Accepted, Retention, SamplingParams, Step, Submit
from model.worker import build

COLOURS = (" red", " blue", " green", " yellow", " purple", " orange", " black", " white", " brown", " pink")
NAMES = ("Anna", "Peter", "Martin", "Clara", "Simon", "Helen", "Oscar", "Julia", "Victor", "Emma")
THINGS = ("door", "coat", "horse", "hat", "house", "carriage", "ribbon", "umbrella", "boat", "lamp")


@dataclass(frozen=True)
class Place:
    """Where a needle stands: so many tokens from the start, or before the end."""

    name: str
    from_start: int = 0
    before_end: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--needles", type=int, default=200)
    parser.add_argument("--length", type=int, default=640, help="tokens of each text")
    parser.add_argument("--sinks", type=int, default=32)
    parser.add_argument("--window", type=int, default=256)


def text_of(seed: int, place: Place, novel: Sequence[int], tokenizer: Tokenizer, length: int) -> tuple[list[int], int]:
    """A text's ids and the number of its colour."""
    draw = random.Random(seed)
    name, thing, colour = draw.choice(NAMES), draw.choice(THINGS), draw.randrange(len(COLOURS))
    fact = tokenizer.encode(f" The {thing} of {name} is{COLOURS[colour]}.", False)
    question = tokenizer.encode(f" Remember: the {thing} of {name} is", False)
    start = draw.randrange(len(novel) - length)
    filler = list(novel[start : start + length - len(fact) - len(question)])
    at = place.from_start if place.from_start >= 0 and not place.before_end else len(filler) - place.before_end
    return [*filler[:at], *fact, *filler[at:], *question], colour


def recall(
    engine: Engine, texts: Sequence[tuple[list[int], int]], colours: Sequence[int], retention: Retention
) -> float:
    """Share of texts whose colour is the most likely of the ten."""
    right = 0
    for number, (ids, _) in enumerate(texts):
        params = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=tuple(colours))
        answer = engine.submit(Submit(str(number), 1, tuple(ids), params, retention))
        if not isinstance(answer, Accepted):
            raise SystemExit(answer.message)
    while engine.has_work:
        for message in engine.step():
            if isinstance(message, Step):
                for row in message.rows:
                    right += bool(row.tokens) and row.tokens[0] == colours[texts[int(row.request)][1]]
    return right / len(texts)


def run(arguments: argparse.Namespace, model: Path, novel: Sequence[int]) -> int:
    """Print recall by place and policy; 1 where a promise does not hold."""
    tokenizer = load_tokenizer(model)
    config = EngineConfig(model=str(model), name=model.name, socket="", dtype=arguments.dtype, max_waiting=1 << 20,
                          max_waiting_tokens=1 << 30, prefix_cache=False)  # fmt: skip
    engine, ready = build(config)
    colours = [tokenizer.encode(colour, False) for colour in COLOURS]
    if any(len(ids) != 1 for ids in colours):
        raise SystemExit("the ten colours are not one token each in this model's vocabulary")
    candidates = [ids[0] for ids in colours]
    retention = Retention("sinks", arguments.sinks, arguments.window)
    places = (
        Place("inside the window", before_end=arguments.window // 2),
        Place("inside the sinks", from_start=2),
        Place("fallen out", before_end=2 * arguments.window - arguments.window // 4),
    )
    print(f"{arguments.needles} needles in {arguments.length} tokens, {ready.dtype} on {ready.kernels}; "
          f"{arguments.sinks} sinks + {arguments.window} recent against full attention, chance 10 %")  # fmt: skip
    held = True
    for place in places:
        texts = [text_of(seed, place, novel, tokenizer, arguments.length) for seed in range(arguments.needles)]
        full = recall(engine, texts, candidates, Retention("none"))
        kept = recall(engine, texts, candidates, retention)
        print(f"{place.name:20} full {full:6.1%}   stream {kept:6.1%}")
        held &= kept < 0.17 if place.name == "fallen out" else kept > full - 0.03
    return 0 if held else 1
