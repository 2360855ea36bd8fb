"""Admission: whether this worker can ever serve a request.

Knows numbers; every refusal is a sentence that names both sides of the comparison and the remedy.
"""

from dataclasses import dataclass

from model.engine.retention import max_blocks, sinks_of
from model.protocol import Rejected, RetentionPolicy, Submit


@dataclass(frozen=True)
class Limits:
    """What a worker can hold: tokens, blocks, requests."""

    vocabulary: int
    context: int
    num_blocks: int
    block_size: int
    max_waiting: int
    max_waiting_tokens: int
    max_stream_tokens: int
    policies: tuple[RetentionPolicy, ...]
    refusals: dict[str, str]

    @property
    def pool_tokens(self) -> int:
        """Tokens that fit into all blocks together."""
        return self.num_blocks * self.block_size

    @property
    def longest(self) -> int:
        """The most tokens a stream without retention can have."""
        return min(self.context, self.pool_tokens)


def refusal(submit: Submit, limits: Limits, num_waiting: int, waiting_tokens: int) -> Rejected | None:
    """Why a request is not taken, or None. `num_waiting`: requests that wait for their first step.

    The bounds of the queue are for new requests: one that was taken before and lost its worker is taken up again.
    """
    found = _bad_ids(submit, limits) or _bad_retention(submit, limits) or _too_long(submit, limits)
    if found is None and submit.attempt == 1:
        found = _queue_full(submit, limits, num_waiting, waiting_tokens)
    if found is None:
        return None
    reason, message, param = found
    return Rejected(submit.request, submit.attempt, reason, message, param)


_Finding = tuple[str, str, str | None]


def _queue_full(submit: Submit, limits: Limits, num_waiting: int, waiting_tokens: int) -> _Finding | None:
    if num_waiting >= limits.max_waiting:
        return "queue_full", f"{num_waiting} requests wait already; send it again in a moment", None
    if waiting_tokens and waiting_tokens + len(submit.prompt) > limits.max_waiting_tokens:
        return "queue_tokens", f"{waiting_tokens} prompt tokens wait already; send it again in a moment", None
    return None


def _bad_ids(submit: Submit, limits: Limits) -> _Finding | None:
    if not submit.prompt:
        return "empty_prompt", "the prompt is empty: give at least one token", "prompt"
    if submit.n < 1:
        return "invalid", f"n is {submit.n}: ask for at least one choice", "n"
    if min(submit.prompt) < 0 or max(submit.prompt) >= limits.vocabulary:
        return "invalid_token", f"token ids must lie between 0 and {limits.vocabulary - 1}", "prompt"
    return None


def _bad_retention(submit: Submit, limits: Limits) -> _Finding | None:
    retention = submit.retention
    if retention.policy not in limits.policies:
        why = limits.refusals.get(retention.policy, "this server does not offer it")
        return "retention", f"retention policy {retention.policy!r} is refused: {why}", "retention.policy"
    if retention.policy == "none":
        return None
    sinks, window = sinks_of(retention), retention.window
    if window < limits.block_size or sinks < 0 or sinks >= window or sinks + window > limits.context:
        return (
            "retention",
            f"retention with {sinks} sinks and a window of {window} does not fit: the window must be at least "
            f"{limits.block_size}, more than the sinks, and both together at most the context of {limits.context}",
            "retention.window",
        )
    needed = max_blocks(retention, limits.block_size, 1)
    if needed > limits.num_blocks:
        return (
            "kv_pool",
            f"this retention needs {needed} KV blocks and the pool has {limits.num_blocks}: choose a smaller "
            "window, or start the server with a larger cache",
            "retention.window",
        )
    return None


def _too_long(submit: Submit, limits: Limits) -> _Finding | None:
    if submit.retention.policy != "none":
        return None
    length = len(submit.prompt)
    room = 0 if submit.params.max_tokens == 0 else 1
    policy = next((name for name in ("sinks", "restart") if name in limits.policies), "")
    stream = f", or stream it with retention policy {policy!r}" if policy else ""
    if length + room > limits.context:
        return (
            "context",
            f"the prompt has {length} tokens and the model's context is {limits.context}: shorten it{stream}",
            "prompt",
        )
    if length + room > limits.pool_tokens:
        return (
            "kv_pool",
            f"the prompt has {length} tokens and the KV pool holds {limits.pool_tokens}: shorten it{stream}, or start "
            "the server with a larger cache",
            "prompt",
        )
    return None
