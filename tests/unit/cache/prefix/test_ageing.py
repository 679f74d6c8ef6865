"""Hit density by age, learned from uses and evictions (jswa/cache/prefix/ageing.py)."""

import numpy as np

from jswa.cache.prefix.ageing import Ageing


def density(ageing: Ageing, age: int, *, reused: bool) -> float:
    """Return the density of one item."""
    return float(ageing.density(np.array([age]), reused=np.array([reused]))[0])


def test_without_statistics_older_items_are_worth_less() -> None:
    """As in LRU."""
    ageing = Ageing()
    for reused in (False, True):
        densities = [density(ageing, age, reused=reused) for age in (0, 1, 3, 10, 100, 10_000)]
        assert densities == sorted(densities, reverse=True)


def test_in_a_loop_items_that_are_used_next_are_worth_most() -> None:
    """Each item is used again after 100 requests: the older it is, the sooner; beyond that age it is never used."""
    ageing = Ageing()
    for _ in range(5_000):
        ageing.count(100, reused=True, hit=True)
    assert density(ageing, 90, reused=True) > 2 * density(ageing, 40, reused=True) > 2 * density(ageing, 5, reused=True)
    assert density(ageing, 400, reused=True) < density(ageing, 40, reused=True)


def test_items_that_were_used_again_have_statistics_of_their_own() -> None:
    """A scan of items that are used once, beside items that are soon used again."""
    ageing = Ageing()
    for _ in range(5_000):
        ageing.count(8, reused=True, hit=True)
        ageing.count(50, reused=False, hit=False)
    assert density(ageing, 2, reused=True) > 20 * density(ageing, 2, reused=False)


def test_old_statistics_fade() -> None:
    """After a change of traffic the new ages decide."""
    ageing = Ageing()
    for _ in range(20_000):
        ageing.count(4, reused=True, hit=True)
    for _ in range(20_000):
        ageing.count(500, reused=True, hit=True)
    assert density(ageing, 450, reused=True) > density(ageing, 2, reused=True)
