"""Draws docs/pictures/sampling.svg: how each control changes one distribution: `python -m bench.sampling_picture`.

Knows the sampler and SVG; the bars are what the sampler really draws from.
"""

import argparse
from pathlib import Path

import torch

from model.engine.sampler import Sampler, SampleRow, SamplerState
from model.protocol import SamplingParams

PICTURE = Path("docs/pictures/sampling.svg")
# Logits of 20 tokens, best first: a few likely ones, some so-so, a tail.
LOGITS = (5.2, 4.9, 4.5, 3.6, 3.4, 3.2, 3.0, 2.2, 2.0, 1.9, 1.8, 1.6, 1.2, 1.0, 0.8, 0.7, 0.5, 0.3, 0.1, -0.2)
OUTPUT = (0, 0, 3, 6)  # ids that have occurred, for the penalties
ROWS: tuple[tuple[str, SamplingParams], ...] = (
    ("the model's own", SamplingParams()),
    ("temperature 0.5", SamplingParams(temperature=0.5)),
    ("temperature 1.5", SamplingParams(temperature=1.5)),
    ("repetition_penalty 1.3", SamplingParams(repetition_penalty=1.3)),
    ("presence_penalty 1", SamplingParams(presence_penalty=1.0)),
    ("top_k 8", SamplingParams(top_k=8)),
    ("top_p 0.8", SamplingParams(top_p=0.8)),
    ("min_p 0.05", SamplingParams(min_p=0.05)),
    ("typical_p 0.2", SamplingParams(typical_p=0.2)),
    ("top_n_sigma 1", SamplingParams(top_n_sigma=1.0)),
    ("XTC, threshold 0.1", SamplingParams(xtc_probability=1.0, xtc_threshold=0.1)),
)
LABEL, BAR, GAP, HEIGHT, TOP = 190, 22, 4, 46, 34
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #222 }
.small { font-size: 12px; fill: #666 }
.kept { fill: #2b6cb0 } .cut { fill: #d9d9d9 } .own { fill: none; stroke: #888; stroke-dasharray: 2 2 }
.line { stroke: #ccc }
@media (prefers-color-scheme: dark) {
  text { fill: #eee } .small { fill: #aaa } .kept { fill: #63b3ed } .cut { fill: #444 } .own { stroke: #999 }
  .line { stroke: #555 }
}
"""


def chances(params: SamplingParams) -> list[float]:
    """What the sampler draws from under these controls."""
    state = SamplerState.start(params, (), OUTPUT)
    logits = torch.tensor([LOGITS])
    found: list[float] = (
        Sampler(len(LOGITS)).distributions(logits, [SampleRow(params, state, 0, len(OUTPUT))])[0].tolist()
    )
    return found


def bars(y: int, own: list[float], after: list[float]) -> list[str]:
    """One line of the picture: dashed the model's own probability, filled what is left of it."""
    scale = (HEIGHT - 10) / 0.6
    parts = []
    for place, (before, now) in enumerate(zip(own, after, strict=True)):
        x = LABEL + place * (BAR + GAP)
        parts.append(
            f'<rect class="own" x="{x}" y="{y - before * scale:.1f}" width="{BAR}" height="{before * scale:.1f}"/>'
        )
        if now > 0:
            tall = max(now * scale, 0.6)
            parts.append(f'<rect class="kept" x="{x}" y="{y - tall:.1f}" width="{BAR}" height="{tall:.1f}"/>')
        else:
            parts.append(f'<rect class="cut" x="{x}" y="{y + 2}" width="{BAR}" height="3"/>')
    parts.append(f'<line class="line" x1="{LABEL}" x2="{LABEL + len(own) * (BAR + GAP)}" y1="{y}" y2="{y}"/>')
    return parts


def picture() -> str:
    """The whole SVG."""
    own = chances(SamplingParams())
    width, height = LABEL + len(LOGITS) * (BAR + GAP) + 90, TOP + len(ROWS) * HEIGHT + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        "<title>How each sampling control changes one distribution over twenty tokens</title>",
        f"<style>{STYLE}</style>",
        f'<text class="small" x="{LABEL}" y="18">dashed: the model\'s own; filled: what is drawn from; '
        "grey underline: cut</text>",
    ]
    for place, (name, params) in enumerate(ROWS):
        y = TOP + (place + 1) * HEIGHT - 8
        after = chances(params)
        parts.append(f'<text x="8" y="{y}">{name}</text>')
        parts += bars(y, own, after)
        kept = sum(chance > 0 for chance in after)
        parts.append(f'<text class="small" x="{width - 80}" y="{y}">{kept} kept</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description="Draw how each sampling control changes one distribution.")
    parser.add_argument("--out", type=Path, default=PICTURE)
    out: Path = parser.parse_args().out
    out.write_text(picture())


if __name__ == "__main__":
    main()
