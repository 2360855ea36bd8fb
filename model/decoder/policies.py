"""Which retention policies a decoder can honour, and in a sentence why it refuses the others.

Knows specs only. What decides is where positions enter: turned into queries and keys they can slide,
added to the embedding from a table they cannot.
"""

from typing import Literal

from model.decoder.spec import DecoderSpec

Policy = Literal["none", "sinks", "window", "restart"]


def policies(spec: DecoderSpec) -> tuple[Policy, ...]:
    """The policies this decoder honours, of "none", "sinks", "window" and "restart"."""
    return ("none", "restart") if spec.positions is not None else ("none", "sinks", "window")


def policy_refusals(spec: DecoderSpec) -> dict[str, str]:
    """A sentence for each policy that is refused."""
    if spec.positions is not None:
        kind = "a learned table" if spec.positions.kind == "learned" else "sinusoids added to the embedding"
        sentence = f'This model takes its positions from {kind}, which cannot slide; use the policy "restart".'
        return {"sinks": sentence, "window": sentence}
    return {"restart": 'This model\'s positions can slide, so nothing needs to restart; use the policy "sinks".'}
