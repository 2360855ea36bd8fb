"""BlockPool: which KV blocks are held, by how many, and which free ones still hold a prefix worth finding.

Knows block numbers, reference counts and opaque keys; does not know sequences, tokens or tensors. A free
block keeps its content and its key until it is handed out again, the one freed longest ago first.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable


class OutOfBlocks(Exception):
    """No free block is left: preempt somebody, or wait."""


class BlockPool:
    """`num_blocks` blocks; block numbers are 0 .. num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._key_of: list[Hashable | None] = [None] * num_blocks
        self._by_key: dict[Hashable, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks somebody holds."""
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by key, held or not."""
        return len(self._by_key)

    def references(self, block: int) -> int:
        """How many hold it."""
        return self._references[block]

    def allocate(self) -> int:
        """A block with one reference and no key. Raises OutOfBlocks."""
        if not self._free:
            raise OutOfBlocks("no free KV block is left")
        block, _ = self._free.popitem(last=False)
        self._forget(block)
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more reference; a free block comes back into use with its content."""
        if self._references[block] == 0:
            del self._free[block]
        self._references[block] += 1

    def release(self, blocks: Iterable[int], reuse_first: bool = False) -> None:
        """One reference less each; give the last ones of a sequence first, so that prefixes live longest.

        `reuse_first`: what falls out of a stream's window is handed out before anything else, so that an endless
        stream goes round in its own few blocks and leaves everybody's prefixes (and untouched memory) alone.
        """
        for block in blocks:
            count = self._references[block] - 1
            if count < 0:
                raise ValueError(f"block {block} was released more often than it was held")
            self._references[block] = count
            if count == 0:
                self._free[block] = None
                if reuse_first or self._key_of[block] is None:  # without a key there is nothing to find in it
                    self._free.move_to_end(block, last=False)

    def find(self, key: Hashable) -> int | None:
        """The block that holds this key's content, held or free."""
        return self._by_key.get(key)

    def register(self, block: int, key: Hashable) -> None:
        """Make a block findable. A block that is found under this key already stays the one."""
        if key not in self._by_key:
            self._forget(block)
            self._by_key[key] = block
            self._key_of[block] = key

    def check(self, held: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless counts, free list and keys agree with the block lists of all holders."""
        counts = [0] * self.num_blocks
        for blocks in held:
            for block in blocks:
                counts[block] += 1
        wrong = [block for block in range(self.num_blocks) if counts[block] != self._references[block]][:8]
        if wrong:
            pairs = {block: (counts[block], self._references[block]) for block in wrong}
            raise AssertionError(f"blocks with (times held, times counted): {pairs}")
        free = {block for block in range(self.num_blocks) if not counts[block]}
        if free != set(self._free):
            raise AssertionError(f"free list and unheld blocks differ in {sorted(free ^ set(self._free))[:8]}")
        keyed = {block for block, key in enumerate(self._key_of) if key is not None}
        if keyed != set(self._by_key.values()) or any(self._key_of[b] != key for key, b in self._by_key.items()):
            raise AssertionError("blocks and keys do not point at each other")

    def _forget(self, block: int) -> None:
        key = self._key_of[block]
        if key is not None:
            del self._by_key[key]
            self._key_of[block] = None
