"""Prefix affinity first, then load."""

from app.routing import CHUNK, PrefixRouter


def prompt(seed, length=4 * CHUNK):
    return [seed * 100_000 + place for place in range(length)]


def test_same_beginning_goes_to_the_same_worker():
    router = PrefixRouter()
    first = router.choose(prompt(1), "", {0: 0, 1: 0})
    other = router.choose(prompt(2), "", {first: 1, 1 - first: 0})
    assert other == 1 - first
    longer = prompt(1) + prompt(3)
    assert router.choose(longer, "", {first: 3, other: 0}) == first


def test_affinity_gives_way_to_load():
    router = PrefixRouter()
    first = router.choose(prompt(1), "", {0: 0, 1: 0})
    assert router.choose(prompt(1), "", {first: 40, 1 - first: 2}) == 1 - first


def test_salts_part_and_a_dead_worker_is_not_chosen():
    router = PrefixRouter()
    first = router.choose(prompt(1), "a", {0: 0, 1: 0})
    assert router.choose(prompt(1), "b", {first: 1, 1 - first: 0}) == 1 - first
    assert router.choose(prompt(1), "a", {1 - first: 9}) == 1 - first


def test_memory_is_bounded():
    router = PrefixRouter(capacity=50)
    for seed in range(100):
        router.choose(prompt(seed), "", {0: 0, 1: 0})
    assert len(router._seen) == 50


def test_short_prompts_balance_by_load():
    router = PrefixRouter()
    assert router.choose([1, 2, 3], "", {0: 5, 1: 4, 2: 9}) == 1
