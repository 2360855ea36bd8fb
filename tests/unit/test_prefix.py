"""Names of blocks: everything a block's content depends on, and nothing else."""

from array import array

from model.engine.block_pool import BlockPool
from model.engine.prefix_cache import PrefixCache


def ids(*tokens):
    return array("i", tokens)


def test_the_same_ids_after_the_same_prefix_have_one_name():
    cache = PrefixCache(BlockPool(4))
    names = []
    for _ in range(2):
        chain = cache.root("")
        for part in (ids(1, 2), ids(3, 4)):
            key = cache.key(chain, part, None)
            chain = cache.advance(chain, key)
        names.append((chain.node, chain.num_blocks))
    assert names[0] == names[1] == (names[0][0], 2)


def test_salt_prefix_ids_and_evictions_all_part_names():
    cache = PrefixCache(BlockPool(4))
    first = cache.root("a")
    second = cache.advance(first, cache.key(first, ids(1, 2), None))
    keys = {
        cache.key(chain, part, eviction)
        for chain in (first, second, cache.root("b"))
        for part in (ids(1, 2), ids(1, 3), ids(258, 2))
        for eviction in (None, (4, 1020), (4, 508), (0, 1020))
    }
    assert len(keys) == 36


def test_a_block_is_found_until_it_is_handed_out_again():
    pool = BlockPool(1)
    cache = PrefixCache(pool)
    chain = cache.root("")
    key = cache.key(chain, ids(5, 6), None)
    assert not cache.knows(key)
    cache.advance(chain, key)
    assert cache.knows(key)
    assert cache.find(key) is None
    block = pool.allocate()
    cache.register(block, key)
    pool.release([block])
    assert cache.find(key) == block
    pool.allocate()
    assert cache.find(key) is None
    assert cache.knows(key)  # the name outlives the block


def test_names_are_bounded_and_a_forgotten_one_is_a_miss_never_a_wrong_hit():
    pool = BlockPool(1)
    cache = PrefixCache(pool, max_nodes=16)
    start = cache.root("")
    first = cache.key(start, ids(0), None)
    old = cache.advance(start, first)
    chain = old
    for token in range(1, 200):
        chain = cache.advance(chain, cache.key(chain, ids(token), None))
        assert cache.num_nodes <= 16
    assert not cache.knows(first)
    again = cache.advance(cache.root(""), cache.key(cache.root(""), ids(0), None))
    assert again.node not in (old.node, chain.node)
    assert cache.key(again, ids(1), None) != cache.key(old, ids(1), None)


def test_names_walked_lately_are_kept():
    cache = PrefixCache(BlockPool(1), max_nodes=16)
    for token in range(100):
        root = cache.root("")
        often = cache.key(root, ids(-1), None)
        cache.advance(root, often)
        cache.advance(root, cache.key(root, ids(token), None))
    assert cache.knows(often)
    assert not cache.knows(cache.key(cache.root(""), ids(3), None))
