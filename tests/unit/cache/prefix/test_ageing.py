"""Hit density by age, learned from uses and evictions (jswa/cache/prefix/ageing.py)."""

from jswa.cache.prefix.ageing import Ageing


def test_without_statistics_older_items_are_worth_less() -> None:
    """As in LRU."""
    ageing = Ageing()
    for reused in (False, True):
        densities = [ageing.density(age, reused=reused) for age in (0, 1, 3, 10, 100, 10_000)]
        assert densities == sorted(densities, reverse=True)


def test_in_a_loop_items_that_are_used_next_are_worth_most() -> None:
    """Each item is used again after 100 requests: the older it is, the sooner; beyond that age it is never used."""
    ageing = Ageing()
    for _ in range(5_000):
        ageing.count(100, reused=True, hit=True)
    assert ageing.density(90, reused=True) > 2 * ageing.density(40, reused=True) > 2 * ageing.density(5, reused=True)
    assert ageing.density(400, reused=True) < ageing.density(40, reused=True)


def test_items_that_were_used_again_have_statistics_of_their_own() -> None:
    """A scan of items that are used once, beside items that are soon used again."""
    ageing = Ageing()
    for _ in range(5_000):
        ageing.count(8, reused=True, hit=True)
        ageing.count(50, reused=False, hit=False)
    assert ageing.density(2, reused=True) > 20 * ageing.density(2, reused=False)


def test_old_statistics_fade() -> None:
    """After a change of traffic the new ages decide."""
    ageing = Ageing()
    for _ in range(20_000):
        ageing.count(4, reused=True, hit=True)
    for _ in range(20_000):
        ageing.count(500, reused=True, hit=True)
    assert ageing.density(450, reused=True) > ageing.density(2, reused=True)
