"""Retention arithmetic: which positions a stream keeps, when blocks fall out, and how a stream is taken up again.

Knows integers only. p is the position of the next token to be computed; a query at p sees j when
j <= p and (j < sinks or j > p - window).

    sinks            freed                 window
    [0 .. sinks-1]   ..................    [p-window+1 .. p]
    blocks: sink blocks are kept whole;    recent blocks from recent_base on
"""

from collections.abc import Sequence

from model.protocol import Retention


def sliding(retention: Retention) -> bool:
    """Whether the policy drops keys while the stream goes on ("restart" computes them anew instead)."""
    return retention.policy in ("sinks", "window")


def sinks_of(retention: Retention) -> int:
    """Tokens kept from the start: none under "window"."""
    return retention.sink_tokens if retention.policy in ("sinks", "restart") else 0


def num_sink_blocks(retention: Retention, block_size: int) -> int:
    """Blocks that hold sinks and are never freed while the stream lives."""
    return -(-sinks_of(retention) // block_size) if sliding(retention) else 0


def first_needed_block(position: int, window: int, block_size: int) -> int:
    """The first recent block that a query at `position` or later can still see."""
    return max(0, position - window + 1) // block_size


def num_evicted(position: int, retention: Retention) -> int:
    """How many of the tokens before `position` the query there cannot see."""
    if retention.policy == "restart":
        return segment_start(position, retention.sink_tokens, retention.window) - retention.sink_tokens
    if not sliding(retention):
        return 0
    return max(0, position - sinks_of(retention) - (retention.window - 1))


def first_loss(retention: Retention, layer_windows: Sequence[int]) -> int:
    """The first position whose query sees other keys than it would without retention, in some layer.

    That is where its first key falls out, at sinks + window; or earlier, where a layer's own trained window lies
    between the two: there the sinks are seen that the trained mask hides. `layer_windows`: 0 for none.
    """
    sinks, window = sinks_of(retention), retention.window
    return min([sinks + window, *(own for own in layer_windows if window < own < sinks + window)])


def replay_reach(retention: Retention, layer_windows: Sequence[int]) -> int:
    """How many last tokens, computed anew, make the kept keys exact.

    Each layer's key depends on one window of the layer below: 1 + sum of (window - 1). `layer_windows` holds
    each layer's own trained window, 0 for none.
    """
    return 1 + sum((min(own, retention.window) if own else retention.window) - 1 for own in layer_windows)


def max_blocks(retention: Retention, block_size: int, chunk: int) -> int:
    """The most blocks a sliding stream holds: while decoding (chunk 1), or in prefill with that chunk."""
    kept = -(-(sinks_of(retention) + retention.window) // block_size) + 2
    return kept if chunk <= 1 else kept + -(-chunk // block_size)


def segment_start(index: int, sinks: int, window: int) -> int:
    """For "restart": the stream's place of the first recent token in the segment that computes stream token `index`.

    The table has sinks + window positions. The first segment holds the stream's first tokens at their own positions
    (its recent tokens begin at place `sinks`). Whenever the table is full, a new segment begins with the sinks and the
    newest half window, from position 0. The answer depends on the index alone, so a stream taken up again has the
    same segments.
    """
    limit = sinks + window
    if index < limit:
        return sinks
    half = max(1, window // 2)
    return limit - half + (index - limit) // (window - half) * (window - half)
