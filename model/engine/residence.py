"""Residence: how a sequence comes into the cache, grows there, loses blocks and leaves.

Knows one pool and one prefix cache; changes a sequence's `blocks`, `computed` and chain. Decides nothing about
who goes first: that is the scheduler's.
"""

from collections.abc import Sequence as Seq

from model.engine.block_pool import BlockPool
from model.engine.prefix_cache import PrefixCache
from model.engine.retention import (
    first_needed_block,
    is_clean,
    num_evicted,
    num_sink_blocks,
    replay_reach,
    restart_segment,
    sliding,
)
from model.engine.sequence import Sequence
from model.engine.stats import Counters


class Residence:
    """Blocks of all sequences. `layer_windows`: each layer's trained window, 0 for none."""

    def __init__(
        self, pool: BlockPool, block_size: int, layer_windows: Seq[int], counters: Counters, use_prefixes: bool = True
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.prefixes = PrefixCache(pool, block_size)
        self._layer_windows = tuple(layer_windows)
        self._counters = counters
        self._use_prefixes = use_prefixes

    def reach(self, sequence: Sequence) -> int:
        """Last tokens that a replay of this stream computes."""
        return replay_reach(sequence.group.submit.retention, self._layer_windows)

    def enter(self, sequence: Sequence) -> None:
        """Prepare a sequence that holds no blocks: find its prefix, or where its replay begins."""
        submit = sequence.group.submit
        retention = submit.retention
        sequence.blocks = []
        sequence.computed = 0
        sequence.segment_start = sequence.sinks
        sequence.sink_blocks = sequence.recent_base = num_sink_blocks(retention, self.block_size)
        sequence.replay_to = 0
        sequence.chain = self.prefixes.root(submit.salt) if self._use_prefixes else None
        if retention.policy == "restart":
            self._enter_segment(sequence)
        if sequence.segment == 0 and sequence.chain is not None and not sequence.wants_scores:
            self._hit(sequence)
        if sliding(retention) and not sequence.wants_scores:
            self._shorten(sequence)

    def _enter_segment(self, sequence: Sequence) -> None:
        retention = sequence.group.submit.retention
        limit = retention.sink_tokens + retention.window
        index = sequence.scored if sequence.wants_scores else len(sequence.log) - 1
        sequence.segment, sequence.segment_start = restart_segment(index, sequence.sinks, retention.window, limit)
        if sequence.segment:
            sequence.chain = None
        self._count_evicted(sequence, sequence.segment_start - sequence.sinks)

    def _hit(self, sequence: Sequence) -> None:
        """Share the blocks of the longest known prefix; the last token is always computed."""
        size, retention = self.block_size, sequence.group.submit.retention
        length = sequence.length
        if sequence.log.available_from:
            return
        chain = sequence.chain
        assert chain is not None
        found: list[int] = []
        if retention.policy == "restart":
            length = min(length, retention.sink_tokens + retention.window)
        while (len(found) + 1) * size < length:
            start = len(found) * size
            key, block = self.prefixes.step(chain, sequence.ids(start, size), self._tag(sequence, start + size))
            if block is None:
                break
            self.pool.share(block)
            found.append(block)
            chain = self.prefixes.advance(chain, key)
        self._counters.prefix_queries += length
        self._counters.prefix_hits += len(found) * size
        sequence.group.cached_tokens = max(sequence.group.cached_tokens, min(len(found) * size, sequence.prompt_length))
        sequence.blocks = found
        sequence.computed = len(found) * size
        sequence.chain = chain
        self.drop_old(sequence)

    def _shorten(self, sequence: Sequence) -> None:
        """Skip what no kept key depends on: after the sink blocks, go on at the replay's first block."""
        size = self.block_size
        start = max(0, sequence.length - self.reach(sequence)) // size * size
        start = max(start, -(-sequence.log.available_from // size) * size)
        if start <= max(sequence.computed, sequence.sink_blocks * size):
            return
        sequence.replay_to = start
        sequence.chain = None
        self.pool.release(reversed(sequence.blocks[sequence.sink_blocks :]))
        del sequence.blocks[sequence.sink_blocks :]
        sequence.computed = min(sequence.computed, len(sequence.blocks) * size)
        sequence.recent_base = sequence.sink_blocks
        self._jump(sequence)

    def _jump(self, sequence: Sequence) -> None:
        """Once the sink blocks are whole, a replay goes on at its own first block."""
        if sequence.replay_to and sequence.computed == sequence.sink_blocks * self.block_size:
            sequence.computed = sequence.replay_to
            sequence.recent_base = sequence.replay_to // self.block_size
            sequence.replay_to = 0
            self._count_evicted(sequence, num_evicted(sequence.computed, sequence.group.submit.retention))

    def chunk(self, sequence: Sequence, budget: int) -> int:
        """How many positions may be computed next, at most `budget`."""
        count = min(sequence.remaining, budget)
        retention = sequence.group.submit.retention
        if sequence.replay_to:
            count = min(count, sequence.sink_blocks * self.block_size - sequence.computed)
        if retention.policy == "restart":
            count = min(count, retention.sink_tokens + retention.window - sequence.computed)
        return count

    def missing(self, sequence: Sequence, count: int) -> int:
        """Blocks to be allocated before `count` more positions can be computed."""
        return max(0, (sequence.computed + count - 1) // self.block_size - sequence.next_logical + 1)

    def grow(self, sequence: Sequence, count: int) -> None:
        """Allocate them. Raises OutOfBlocks; what was allocated until then stays with the sequence."""
        for _ in range(self.missing(sequence, count)):
            sequence.blocks.append(self.pool.allocate())
            sequence.version += 1

    def advance(self, sequence: Sequence, count: int) -> None:
        """Account for `count` positions just computed: name full blocks, drop old ones, roll a full segment."""
        sequence.computed += count
        if sequence.chain is not None:
            self._register(sequence)
        self._jump(sequence)
        self.drop_old(sequence)
        retention = sequence.group.submit.retention
        if retention.policy == "restart" and sequence.computed >= retention.sink_tokens + retention.window:
            self._roll(sequence)

    def _roll(self, sequence: Sequence) -> None:
        """The table is full: the next token begins a new segment."""
        retention = sequence.group.submit.retention
        limit = retention.sink_tokens + retention.window
        following = sequence.place(sequence.computed)
        self.leave(sequence)
        sequence.chain = None
        sequence.segment, sequence.segment_start = restart_segment(following, sequence.sinks, retention.window, limit)
        self._count_evicted(sequence, sequence.segment_start - sequence.sinks)

    def drop_old(self, sequence: Sequence) -> None:
        """Free the blocks that fell out of the window."""
        retention = sequence.group.submit.retention
        if not sliding(retention):
            return
        first = first_needed_block(sequence.computed, retention.window, self.block_size)
        keep = sequence.sink_blocks
        count = min(first - sequence.recent_base, len(sequence.blocks) - keep)
        if count > 0:
            self.pool.release(sequence.blocks[keep : keep + count])
            del sequence.blocks[keep : keep + count]
            sequence.recent_base += count
            sequence.version += 1
        self._count_evicted(sequence, num_evicted(sequence.computed, retention))

    def leave(self, sequence: Sequence) -> None:
        """Give all blocks back; what was computed is forgotten, or found again by its prefix."""
        self.pool.release(reversed(sequence.blocks))
        sequence.blocks = []
        sequence.computed = 0
        sequence.version += 1

    def fork(self, parent: Sequence, child: Sequence) -> tuple[int, int] | None:
        """Give `child` the parent's blocks: full ones by reference, a partial last one as a copy.

        Returns (source, target) of the copy, or None. Raises OutOfBlocks with nothing taken.
        """
        partial = parent.computed % self.block_size != 0
        full = parent.blocks[:-1] if partial else parent.blocks
        copy = self.pool.allocate() if partial else None
        for block in full:
            self.pool.share(block)
        child.blocks = full + ([copy] if copy is not None else [])
        for name in ("computed", "sink_blocks", "recent_base", "segment", "segment_start", "chain", "evicted"):
            setattr(child, name, getattr(parent, name))
        child.version += 1
        return None if copy is None else (parent.blocks[-1], copy)

    def _register(self, sequence: Sequence) -> None:
        size = self.block_size
        chain = sequence.chain
        assert chain is not None
        while (chain.num_blocks + 1) * size <= sequence.computed:
            logical = chain.num_blocks
            start = logical * size
            key, known = self.prefixes.step(chain, sequence.ids(start, size), self._tag(sequence, start + size))
            entry = logical if logical < sequence.sink_blocks else sequence.sink_blocks + logical - sequence.recent_base
            if known is None:
                self.prefixes.register(sequence.blocks[entry], key)
            chain = self.prefixes.advance(chain, key)
        sequence.chain = chain

    def _tag(self, sequence: Sequence, end: int) -> tuple[int, int] | None:
        """What a block that ends at position `end` depends on beside its ids."""
        retention = sequence.group.submit.retention
        return None if is_clean(end, retention) else (sequence.sinks, retention.window)

    def _count_evicted(self, sequence: Sequence, total: int) -> None:
        if total > sequence.evicted:
            self._counters.tokens_evicted += total - sequence.evicted
            sequence.evicted = total
