"""`python -m model.checkpoint.inspect MODEL [--json]`: what a model is made of, for a person to read.

Reads headers and configuration, no weights. Knows how to say things; what is said comes from the spec, the
table of tensors and a rehearsal of loading, so a model that would not load is said to be broken here too.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from model.checkpoint.opening import Opened, open_checkpoint
from model.checkpoint.rehearsal import rehearse
from model.decoder.kernels import kv_bytes_per_token
from model.decoder.parameters import Parameter
from model.decoder.policies import policies, policy_refusals
from model.decoder.spec import AttentionSpec, DecoderSpec, LayerSpec
from model.gguf_file import CheckpointError

_SHOWN = 6


def describe(opened: Opened) -> dict[str, object]:
    """Everything the table shows, as plain values; raises CheckpointError where loading would."""
    parameters = rehearse(opened)
    spec = opened.spec
    counts = Counter[str]()
    for parameter in parameters:
        counts[_part(parameter.name)] += _size(parameter)
    by_type = Counter[str]()
    for name in opened.books.used:
        by_type[opened.table[name].kind] += opened.table[name].num_bytes
    return {
        "model": str(opened.path),
        "format": opened.format,
        "architecture": opened.architecture,
        "family": spec.family,
        "layers": len(spec.layers),
        "width": spec.width,
        "vocabulary": spec.vocabulary,
        "context": spec.context,
        "attention": _runs(spec.layers, _attention),
        "feed-forward": _runs(spec.layers, _feed_forward),
        "positions": _positions(spec),
        "window": _runs(spec.layers, _window),
        "head": "tied to the embedding" if spec.tied_head else "of its own",
        "parameters": dict(counts) | {"total": counts.total()},
        "bytes": dict(by_type.most_common()) | {"total": by_type.total()},
        "kv_bytes_per_token": {name: kv_bytes_per_token(spec, size) for name, size in (("float32", 4), ("16-bit", 2))},
        "retention": {"honoured": list(policies(spec)), "refused": policy_refusals(spec)},
        "bos_token_id": opened.bos_token_id,
        "eos_token_ids": list(opened.eos_token_ids),
        "dropped": dict(opened.books.dropped),
    }


def main(arguments: Sequence[str]) -> int:
    """The process: 0 and a table (or JSON) on standard output, or 1 and one sentence on standard error."""
    flags = [argument for argument in arguments if argument.startswith("-")]
    paths = [argument for argument in arguments if not argument.startswith("-")]
    if len(paths) != 1 or set(flags) - {"--json"}:
        print("error: Give one model and at most the flag --json.", file=sys.stderr)
        return 2
    try:
        facts = describe(open_checkpoint(paths[0]))
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        if flags:
            print(json.dumps(facts, indent=2, ensure_ascii=False))
        else:
            Console().print(_table(facts))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` say, has seen enough; what is left is flushed at exit, to nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _table(facts: dict[str, object]) -> Table:
    table = Table(show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), _cell(name, value))
    return table


def _cell(name: str, value: object) -> str:
    """One cell's text; numbers are grouped in threes, lists go one a line."""
    if name == "retention" and isinstance(value, dict):
        return "\n".join([f"honoured: {', '.join(value['honoured'])}", *_pairs(value["refused"], "refused, {}: {}")])
    if name == "dropped" and isinstance(value, dict):
        lines = _pairs(value, "{}: {}")
        more = [f"… and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        return "\n".join(lines[:_SHOWN] + more) or "nothing"
    if isinstance(value, dict):
        return "\n".join(f"{_number(number):>15}  {part}" for part, number in value.items())
    if isinstance(value, list):
        return "\n".join(map(str, value)) if name != "eos_token_ids" else ", ".join(map(str, value))
    return _number(value) if isinstance(value, int) and not name.endswith("_id") else str(value)


def _pairs(rows: dict[str, str], form: str) -> list[str]:
    return [form.format(*row) for row in rows.items()]


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _size(parameter: Parameter) -> int:
    count = 1
    for size in parameter.shape:
        count *= size
    return count


def _part(name: str) -> str:
    """The part of the decoder that a parameter of ours is counted under."""
    place = name.split(".")
    if place[0] != "layers":
        return "norms" if place[0].endswith("norm") else place[0]
    if place[2] in ("attention", "mlp"):
        return {"attention": "attention", "mlp": "feed-forward"}[place[2]]
    return "norms"


def _runs(layers: Sequence[LayerSpec], say: Callable[[LayerSpec], str]) -> list[str]:
    """What `say` says of the layers, each saying once, with the layers it holds for where they differ."""
    places: dict[str, list[int]] = {}
    for number, layer in enumerate(layers):
        places.setdefault(say(layer), []).append(number)
    if len(places) == 1:
        return list(places)
    return [f"{said} (layer{'s' if len(numbers) > 1 else ''} {_ranges(numbers)})" for said, numbers in places.items()]


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges: "0-4, 6-10"."""
    parts = []
    first = last = numbers[0]
    for number in [*numbers[1:], -1]:
        if number == last + 1:
            last = number
            continue
        parts.append(str(first) if first == last else f"{first}-{last}")
        first = last = number
    return ", ".join(parts)


def _positions(spec: DecoderSpec) -> list[str]:
    """Where positions enter: a table at the embedding, or each layer's attention."""
    if spec.positions is not None:
        return [f"{spec.positions.kind}, {spec.positions.count:,} positions"]
    return _runs(spec.layers, lambda layer: _rotation(layer.attention))


def _rotation(attention: AttentionSpec) -> str:
    if attention.alibi:
        return "ALiBi"
    rope = attention.rope
    if rope is None:
        return "none"
    part = "" if rope.dim == attention.head_dim else f" on {rope.dim} of {attention.head_dim}"
    scaled = "" if rope.scaling is None else f", {rope.scaling} scaling by {rope.factor:g}"
    return f"rotary, base {rope.base:,.10g}, {rope.layout}{part}{scaled}"


def _attention(layer: LayerSpec) -> str:
    spec = layer.attention
    kind = "multi-head" if spec.kv_heads == spec.heads else "multi-query" if spec.kv_heads == 1 else "grouped"
    extras = [
        text
        for text, there in (
            ("qkv bias", spec.qkv_bias),
            ("qk-norm", spec.qk_norm is not None),
            (f"clip {spec.clip_qkv}", spec.clip_qkv is not None),
            (f"soft cap {spec.softcap}", spec.softcap is not None),
            ("sink logits", spec.sink_logits),
            ("parallel to the feed-forward", layer.parallel),
        )
        if there
    ]
    heads = f"{spec.heads} heads of {spec.head_dim}, {spec.kv_heads} for keys and values ({kind})"
    return ", ".join([heads, *extras])


def _feed_forward(layer: LayerSpec) -> str:
    spec = layer.mlp
    return f"{spec.width:,} wide, {spec.activation}{', gated' if spec.gated else ''}{', biased' if spec.bias else ''}"


def _window(layer: LayerSpec) -> str:
    window = layer.attention.window
    return "everything before" if window is None else f"the last {window:,} tokens"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
