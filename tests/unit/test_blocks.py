"""The block pool: counts, order of reuse, keys, and a check that notices when they disagree."""

import random

import pytest

from model.engine.block_pool import BlockPool, OutOfBlocks


def test_all_blocks_then_none():
    pool = BlockPool(3)
    assert sorted(pool.allocate() for _ in range(3)) == [0, 1, 2]
    with pytest.raises(OutOfBlocks):
        pool.allocate()
    assert (pool.num_free, pool.num_used) == (0, 3)


def test_the_block_freed_longest_ago_is_reused_first():
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    for number, block in enumerate(blocks):
        pool.register(block, number)
    pool.release([blocks[1]])
    pool.release([blocks[0]])
    pool.release([blocks[2]])
    assert [pool.allocate() for _ in range(3)] == [blocks[1], blocks[0], blocks[2]]


def test_blocks_without_content_go_before_those_that_may_be_found():
    pool = BlockPool(3)
    kept, empty, dropped = (pool.allocate() for _ in range(3))
    pool.register(kept, "kept")
    pool.register(dropped, "dropped")
    pool.release([kept])
    pool.release([empty])
    assert pool.allocate() == empty
    pool.release([dropped], reuse_first=True)
    assert pool.allocate() == dropped
    assert pool.find("dropped") is None
    assert pool.find("kept") == kept


def test_a_free_block_comes_back_with_its_content():
    pool = BlockPool(2)
    block = pool.allocate()
    pool.register(block, "key")
    pool.release([block])
    assert pool.find("key") == block
    pool.share(block)
    pool.share(block)
    assert pool.references(block) == 2
    pool.release([block])
    assert pool.num_used == 1
    pool.check([[block]])


def test_the_first_block_under_a_key_stays_the_one():
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    pool.register(first, "key")
    pool.register(second, "key")
    assert pool.find("key") == first
    assert pool.num_cached == 1


def test_releasing_too_often_is_an_error():
    pool = BlockPool(1)
    block = pool.allocate()
    pool.release([block])
    with pytest.raises(ValueError, match="more often"):
        pool.release([block])


def test_the_check_notices_a_leak_a_loss_and_a_wrong_key():
    pool = BlockPool(4)
    held = [pool.allocate(), pool.allocate()]
    pool.register(held[0], "key")
    pool.check([held])
    with pytest.raises(AssertionError, match="held"):
        pool.check([held[:1]])
    with pytest.raises(AssertionError, match="held"):
        pool.check([held, held])
    pool._key_of[held[1]] = "another"
    with pytest.raises(AssertionError, match="keys"):
        pool.check([held])


def test_a_thousand_random_events_keep_the_books():
    draw = random.Random(1)
    pool = BlockPool(12)
    holders: list[list[int]] = [[] for _ in range(4)]
    for event in range(1000):
        holder = draw.choice(holders)
        kind = draw.random()
        if kind < 0.4 and pool.num_free:
            holder.append(pool.allocate())
            pool.register(holder[-1], draw.randrange(30))
        elif kind < 0.6:
            block = pool.find(draw.randrange(30))
            if block is not None:
                pool.share(block)
                holder.append(block)
        elif holder:
            pool.release([holder.pop(draw.randrange(len(holder)))], reuse_first=bool(event % 2))
        pool.check(holders)
