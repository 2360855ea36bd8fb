"""Prefix cache: the chain of keys that names a full block by everything its content depends on.

Knows ids, keys and the pool; does not know sequences or when a lookup is allowed. A key is (number of the
parent's node, the block's ids, what else matters), compared whole: a hit is verified against the ids by
construction, and no two different prefixes can meet.

    root(salt) ── block 0 ── block 1 ── block 2            clean: no query in it has lost a key yet
                         └── block 1'── block 2' + (sinks, window)    past the first eviction
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from model.engine.block_pool import BlockPool

Key = Hashable


@dataclass(frozen=True)
class Chain:
    """Where a sequence stands in the tree: the node of its last full block, and how many blocks led there."""

    node: int
    num_blocks: int = 0


class PrefixCache:
    """Names of blocks over one pool."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._roots: dict[str, int] = {}
        self._nodes: dict[Key, int] = {}
        self._next = 0

    def root(self, salt: str) -> Chain:
        """The start of every chain of one salt."""
        if salt not in self._roots:
            self._roots[salt] = self._new_node()
        return Chain(self._roots[salt])

    def step(self, chain: Chain, ids: Sequence[int], eviction: Hashable) -> tuple[Key, int | None]:
        """The key of the next block, and the block that holds it now, if any. `eviction` is None while clean."""
        key = (chain.node, tuple(ids), eviction)
        return key, self._pool.find(key)

    def advance(self, chain: Chain, key: Key) -> Chain:
        """The chain one block further."""
        node = self._nodes.get(key)
        if node is None:
            if len(self._nodes) > 4 * self._pool.num_blocks:
                self._prune()
            node = self._nodes[key] = self._new_node()
        return Chain(node, chain.num_blocks + 1)

    def register(self, block: int, key: Key) -> int:
        """Make a computed full block findable; returns the block that holds the key (an older one wins)."""
        return self._pool.register(block, key)

    def _new_node(self) -> int:
        self._next += 1
        return self._next

    def _prune(self) -> None:
        """Drop names whose block is gone. A chain that comes by again gets a new node: a miss, never a wrong hit."""
        self._nodes = {key: node for key, node in self._nodes.items() if self._pool.find(key) is not None}
