"""Residence: how a sequence comes into the cache, grows there, loses blocks and leaves.

Knows one pool and one prefix cache; changes a sequence's `blocks`, `computed` and chain. Decides nothing about
who goes first: that is the scheduler's.
"""

from collections.abc import Sequence as Seq

from model.engine.block_pool import BlockPool
from model.engine.prefix_cache import Chain, PrefixCache
from model.engine.retention import (
    first_loss,
    first_needed_block,
    num_evicted,
    num_sink_blocks,
    replay_reach,
    segment_start,
    sliding,
)
from model.engine.sequence import Sequence, no_blocks
from model.engine.stats import Counters
from model.protocol import Retention


class Residence:
    """Blocks of all sequences. `layer_windows`: each layer's trained window, 0 for none."""

    def __init__(
        self, pool: BlockPool, block_size: int, layer_windows: Seq[int], counters: Counters, use_prefixes: bool = True
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.prefixes = PrefixCache(pool)
        self._layer_windows = tuple(layer_windows)
        self._counters = counters
        self._use_prefixes = use_prefixes

    def reach(self, retention: Retention) -> int:
        """Last tokens that a replay of such a stream computes."""
        return replay_reach(retention, self._layer_windows)

    def enter(self, sequence: Sequence) -> None:
        """Prepare a sequence that holds no blocks: find its prefix, or where its replay begins."""
        submit = sequence.group.submit
        retention = submit.retention
        sequence.blocks = no_blocks()
        sequence.computed = sequence.replay_to = sequence.exact_from = sequence.num_hit = 0
        sequence.sink_blocks = sequence.recent_base = num_sink_blocks(retention, self.block_size)
        sequence.segment_start = sequence.sinks
        if retention.policy == "restart":
            index = sequence.scored if sequence.wants_scores else len(sequence.log) - 1
            sequence.segment_start = segment_start(index, sequence.sinks, retention.window)
        whole = sequence.log.available_from == 0 and sequence.segment_start == sequence.sinks
        sequence.chain = self.prefixes.root(submit.salt) if self._use_prefixes and whole else None
        if not sequence.wants_scores:
            if sequence.chain is not None:
                self._hit(sequence, sequence.chain)
            if sliding(retention):
                self._shorten(sequence)

    def entered(self, sequence: Sequence) -> None:
        """The sequence runs now: count what its coming in saved or cost."""
        counters = self._counters
        self._count_evicted(sequence)
        if sequence.preempted:
            counters.replayed_tokens += sequence.remaining - 1
            sequence.preempted = False
        elif sequence.chain is not None and not sequence.wants_scores:
            counters.prefix_queries += sequence.length
            counters.prefix_hits += sequence.num_hit
            sequence.group.cached_tokens = min(sequence.num_hit, sequence.prompt_length)

    def _hit(self, sequence: Sequence, chain: Chain) -> None:
        """Share the blocks of the longest known prefix; the last token is always computed.

        The chain is followed by its names, so blocks that fell out of a stream's window need not be there any more:
        the sinks and one window before the place to go on at are enough.
        """
        size, retention = self.block_size, sequence.group.submit.retention
        window = retention.window if sliding(retention) else None
        limit = sequence.length
        if retention.policy == "restart":
            limit = min(limit, sequence.sinks + retention.window)
        found: list[int | None] = []
        chains = [chain]
        best = unbroken = 0
        while (len(found) + 1) * size < limit:
            start = len(found) * size
            key = self.prefixes.key(chain, sequence.ids(start, size), self._tag(sequence, start + size))
            if not self.prefixes.knows(key):
                break
            block = self.prefixes.find(key)
            if block is None and (window is None or len(found) < sequence.sink_blocks):
                break
            found.append(block)
            chain = self.prefixes.advance(chain, key)
            chains.append(chain)
            unbroken = unbroken + 1 if block is not None else 0
            needed = 0 if window is None else first_needed_block(len(found) * size, window, size)
            if unbroken >= len(found) - max(needed, sequence.sink_blocks):
                best = len(found)
        first = 0 if window is None else first_needed_block(best * size, window, size)
        first = max(first, min(sequence.sink_blocks, best))
        for block in (*found[: min(sequence.sink_blocks, best)], *found[first:best]):
            assert block is not None
            self.pool.share(block)
            sequence.blocks.append(block)
        sequence.recent_base = max(first, sequence.sink_blocks)
        sequence.computed = sequence.num_hit = best * size
        sequence.chain = chains[best]

    def _shorten(self, sequence: Sequence) -> None:
        """Skip what no kept key depends on: after the sink blocks, go on at the replay's first block."""
        size, retention = self.block_size, sequence.group.submit.retention
        # Two blocks more than the reach: the same prompt, sent again, finds a whole window before its last token.
        start = max(0, sequence.length - self.reach(retention) - 2 * size) // size * size
        start = max(start, -(-sequence.log.available_from // size) * size)
        sinks_end = sequence.sink_blocks * size
        if start <= max(sequence.computed, sinks_end):
            return
        self.pool.release(reversed(sequence.blocks[sequence.sink_blocks :]))
        del sequence.blocks[sequence.sink_blocks :]
        sequence.computed = sequence.num_hit = min(sequence.computed, len(sequence.blocks) * size)
        sequence.recent_base = sequence.sink_blocks
        last_window = min(self._layer_windows[-1] or retention.window, retention.window)
        sequence.exact_from = start + self.reach(retention) - last_window
        sequence.replay_to = start
        self._jump(sequence)

    def _jump(self, sequence: Sequence) -> None:
        """Once the sink blocks are whole, a replay goes on at its own first block."""
        if sequence.replay_to and sequence.computed == sequence.sink_blocks * self.block_size:
            sequence.computed = sequence.replay_to
            sequence.recent_base = sequence.replay_to // self.block_size
            sequence.replay_to = 0

    def chunk(self, sequence: Sequence, budget: int) -> int:
        """How many positions may be computed next, at most `budget`."""
        count = min(sequence.remaining, budget)
        if sequence.replay_to:
            count = min(count, sequence.sink_blocks * self.block_size - sequence.computed)
        retention = sequence.group.submit.retention
        if retention.policy == "restart":
            count = min(count, sequence.sinks + retention.window - sequence.computed)
        return count

    def missing(self, sequence: Sequence, count: int) -> int:
        """Blocks to be allocated before `count` more positions can be computed."""
        return max(0, (sequence.computed + count - 1) // self.block_size - sequence.next_logical + 1)

    def affordable(self, sequence: Sequence) -> int:
        """Positions that can be computed with the blocks that are free now."""
        return (sequence.next_logical + self.pool.num_free) * self.block_size - sequence.computed

    def grow(self, sequence: Sequence, count: int) -> None:
        """Allocate them. Raises OutOfBlocks; what was allocated until then stays with the sequence."""
        for _ in range(self.missing(sequence, count)):
            sequence.blocks.append(self.pool.allocate())

    def advance(self, sequence: Sequence, count: int) -> None:
        """Account for `count` positions just computed: name full blocks, drop old ones, roll a full segment."""
        sequence.computed += count
        if sequence.chain is not None:
            self._register(sequence, sequence.chain)
        retention = sequence.group.submit.retention
        if retention.policy == "none":
            return
        self._jump(sequence)
        if retention.policy != "restart":
            self.drop_old(sequence)
        elif sequence.computed >= sequence.sinks + retention.window:
            self._roll(sequence)

    def _roll(self, sequence: Sequence) -> None:
        """The table is full: the next token begins a new segment, from position 0."""
        following = sequence.place(sequence.computed)
        self.leave(sequence)
        sequence.chain = None
        sequence.segment_start = segment_start(following, sequence.sinks, sequence.group.submit.retention.window)
        self._count_evicted(sequence)

    def drop_old(self, sequence: Sequence) -> None:
        """Free the blocks that fell out of the window."""
        retention = sequence.group.submit.retention
        keep = sequence.sink_blocks
        first = first_needed_block(sequence.computed, retention.window, self.block_size)
        count = min(first - sequence.recent_base, len(sequence.blocks) - keep)
        if count > 0:
            # Blocks of the prompt may be asked for again; those of an endless output are handed out first.
            end = (sequence.recent_base + count) * self.block_size
            worth = end <= max(sequence.prompt_length, sequence.sinks + retention.window)
            self.pool.release(sequence.blocks[keep : keep + count], reuse_first=not worth)
            del sequence.blocks[keep : keep + count]
            sequence.recent_base += count
        self._count_evicted(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Give all blocks back; what was computed is forgotten, or found again by its prefix."""
        self.pool.release(reversed(sequence.blocks))
        sequence.blocks = no_blocks()
        sequence.computed = 0

    def fork(self, parent: Sequence, child: Sequence) -> tuple[int, int] | None:
        """Give `child` the parent's blocks: full ones by reference, a partial last one as a copy.

        Returns (source, target) of the copy, or None. Raises OutOfBlocks with nothing taken.
        """
        partial = parent.computed % self.block_size != 0
        full = parent.blocks[:-1] if partial else parent.blocks[:]
        copy = self.pool.allocate() if partial else None
        for block in full:
            self.pool.share(block)
        child.blocks = full
        if copy is not None:
            child.blocks.append(copy)
        child.computed = parent.computed
        child.sink_blocks, child.recent_base = parent.sink_blocks, parent.recent_base
        child.segment_start = parent.segment_start
        child.exact_from, child.chain = parent.exact_from, parent.chain
        child.evicted = parent.evicted
        return None if copy is None else (parent.blocks[-1], copy)

    def _register(self, sequence: Sequence, chain: Chain) -> None:
        """Name the blocks that are full now; those a replay only passes through are named but not made findable."""
        size = self.block_size
        while (chain.num_blocks + 1) * size <= sequence.computed:
            logical = chain.num_blocks
            start = logical * size
            key = self.prefixes.key(chain, sequence.ids(start, size), self._tag(sequence, start + size))
            if start >= sequence.exact_from or logical < sequence.sink_blocks:
                self.prefixes.register(sequence.blocks[sequence.entry(logical)], key)
            chain = self.prefixes.advance(chain, key)
        sequence.chain = chain

    def _tag(self, sequence: Sequence, end: int) -> tuple[int, int] | None:
        """What a block that ends at position `end` depends on beside its ids."""
        retention = sequence.group.submit.retention
        if not sliding(retention) or end <= first_loss(retention, self._layer_windows):
            return None
        return sequence.sinks, retention.window

    def _count_evicted(self, sequence: Sequence) -> None:
        """Keep the running total of tokens that the next query cannot see any more."""
        retention = sequence.group.submit.retention
        if retention.policy == "restart":
            total = sequence.segment_start - sequence.sinks
        else:
            total = num_evicted(sequence.computed, retention)
        if total > sequence.evicted:
            self._counters.tokens_evicted += total - sequence.evicted
            sequence.evicted = total
