"""Prefix cache: the chain of keys that names a full block by everything its content depends on.

Knows ids, keys and the pool; does not know sequences or when a lookup is allowed. A key is (number of the
parent's node, the block's ids, what else matters), compared whole: a hit is verified against the ids by
construction, and no two different prefixes can meet. Nodes outlive their blocks, so that a stream whose old
blocks are gone is still found by its last ones.

    root(salt) ── block 0 ── block 1 ── block 2            clean: no query in it has lost a key yet
                         └── block 1'── block 2' + (sinks, window)    past the first eviction
"""

from array import array
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import islice

from model.engine.block_pool import BlockPool

Key = Hashable


@dataclass(frozen=True, slots=True)
class Chain:
    """Where a sequence stands in the tree: the node of its last full block, and how many blocks led there."""

    node: int
    num_blocks: int = 0


class PrefixCache:
    """Names of blocks over one pool. At most `max_nodes` names are kept; the ones walked longest ago go first."""

    def __init__(self, pool: BlockPool, max_nodes: int = 0) -> None:
        self._pool = pool
        self._max_nodes = max_nodes or 4 * pool.num_blocks + 4096
        self._nodes: dict[Key, int] = {}
        self._next = 0

    @property
    def num_nodes(self) -> int:
        """Names in memory."""
        return len(self._nodes)

    def root(self, salt: str) -> Chain:
        """The start of every chain of one salt."""
        return Chain(self._node(salt))

    @staticmethod
    def key(chain: Chain, ids: "array[int]", eviction: Hashable) -> Key:
        """The key of the block after `chain`. `eviction` is None while no query in it has lost a key."""
        return chain.node, ids.tobytes(), eviction

    def find(self, key: Key) -> int | None:
        """The block that holds this content now, if any."""
        return self._pool.find(key)

    def knows(self, key: Key) -> bool:
        """Whether a chain has come by here."""
        return key in self._nodes

    def advance(self, chain: Chain, key: Key) -> Chain:
        """The chain one block further."""
        return Chain(self._node(key), chain.num_blocks + 1)

    def register(self, block: int, key: Key) -> None:
        """Make a computed full block findable (one that was there before wins)."""
        self._pool.register(block, key)

    def _node(self, key: Key) -> int:
        node = self._nodes.pop(key, None)
        if node is None:
            if len(self._nodes) >= self._max_nodes:
                # A chain that comes by again gets new numbers: a miss, never a wrong hit.
                for old in list(islice(self._nodes, max(1, self._max_nodes // 8))):
                    del self._nodes[old]
            self._next += 1
            node = self._next
        self._nodes[key] = node
        return node
