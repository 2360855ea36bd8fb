"""Names: a checkpoint's tensors against a family's table, with books kept.

Knows strings only. A pattern such as "model.layers.{}.mlp.up_proj.weight" stands for every layer; its value
is our name, or None for a tensor that is dropped on purpose. What no pattern names is a complaint.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from model.gguf_file import CheckpointError

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_FEW = 5


@dataclass(frozen=True)
class Books:
    """Where every tensor of the checkpoint went: `used` maps its name to ours, `dropped` to the reason."""

    used: Mapping[str, str]
    dropped: Mapping[str, str] = field(default_factory=dict)


def translate(name: str, patterns: Mapping[str, str | None], prefix: str = "") -> tuple[bool, str | None]:
    """(is it named at all, our name or None). `prefix` is tried in front of names a bare base model lacks it in."""
    for full in (name, prefix + name) if prefix else (name,):
        if full in patterns:
            return True, patterns[full]
        pattern = _NUMBER.sub("{}", full)
        if pattern in patterns:
            ours = patterns[pattern]
            return True, None if ours is None else ours.format(*_NUMBER.findall(full))
    return False, None


def assign(
    names: Iterable[str],
    patterns: Mapping[str, str | None],
    *,
    where: str,
    prefix: str = "",
    tied_head: bool = False,
    num_layers: int | None = None,
) -> Books:
    """Books for all `names`; raises CheckpointError for names the family does not know or that claim one place.

    With a tied head a stored copy of it is dropped; tensors of layers beyond `num_layers` are complaints.
    """
    used: dict[str, str] = {}
    dropped: dict[str, str] = {}
    unknown: list[str] = []
    taken: dict[str, str] = {}
    for name in names:
        known, ours = translate(name, patterns, prefix)
        if not known:
            unknown.append(name)
        elif ours is None:
            dropped[name] = "not a parameter of this family's forward pass"
        elif ours == "head" and tied_head:
            dropped[name] = "the head is tied to the embedding"
        elif ours in taken:
            raise CheckpointError(
                f"{where}: the tensors {taken[ours]!r} and {name!r} are the same parameter ({ours}); "
                "the file mixes two models, convert it again."
            )
        else:
            used[name], taken[ours] = ours, name
    if num_layers is not None:
        unknown += [name for name, ours in used.items() if _layer(ours) >= num_layers]
    if unknown:
        shown = ", ".join(repr(name) for name in unknown[:_FEW]) + (" …" if len(unknown) > _FEW else "")
        raise CheckpointError(
            f"{where}: {len(unknown)} tensors have no place in this model ({shown}); "
            "the file is of another architecture than it says, or of a newer variant: use another checkpoint."
        )
    return Books(used, dropped)


def _layer(ours: str) -> int:
    """The layer a name of ours belongs to; -1 for what stands outside the layers."""
    match = re.match(r"layers\.(\d+)\.", ours)
    return int(match[1]) if match else -1
