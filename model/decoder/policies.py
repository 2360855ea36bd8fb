"""Which retention policies a decoder can honour, and in a sentence why it refuses the others.

Knows specs only. What decides is where positions enter: turned into queries and keys they can slide,
added to the embedding from a table they cannot.
"""

from typing import Literal

from model.decoder.spec import DecoderSpec

Policy = Literal["none", "sinks", "window", "restart"]
ALL: tuple[Policy, ...] = ("none", "sinks", "window", "restart")


def policies(spec: DecoderSpec) -> tuple[Policy, ...]:
    """The policies this decoder honours."""
    refused = policy_refusals(spec)
    return tuple(policy for policy in ALL if policy not in refused)


def policy_refusals(spec: DecoderSpec) -> dict[str, str]:
    """A sentence for each policy that is refused."""
    if spec.positions is None:
        return {}
    kind = "learned" if spec.positions.kind == "learned" else "sinusoidal"
    reason = (
        f"this model adds {kind} positions to its embeddings: a kept key cannot slide to another position, and the "
        f"table ends at {spec.positions.count}; use the policy 'restart'"
    )
    return {"sinks": reason, "window": reason}
