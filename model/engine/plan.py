"""Plan: what one step computes, as integers. A decode row is a row of count 1; there is no phase flag.

Knows sequences by reference; the scheduler makes it, batch and runner read it.
"""

from dataclasses import dataclass, field

from model.engine.sequence import Sequence


@dataclass(slots=True)
class PlanRow:
    """Positions start .. start + count - 1 of a sequence. `sample`: the last one's logits become a token.

    `score`: the logits of all of them are wanted, to be compared with the prompt's next ids.
    """

    sequence: Sequence
    start: int
    count: int
    sample: bool
    score: bool = False


@dataclass(slots=True)
class Plan:
    """One step. `copies` are (source, target) blocks to be copied before it."""

    rows: list[PlanRow]
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens the step computes."""
        return sum(row.count for row in self.rows)
