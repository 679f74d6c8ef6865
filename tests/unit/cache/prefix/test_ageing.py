"""What ages of use teach (jswa/cache/prefix/ageing.py)."""

from jswa.cache.prefix.ageing import Ageing


def test_before_anything_is_known_the_old_are_worth_less() -> None:
    """LRU."""
    ageing = Ageing()
    for reused in (False, True):
        densities = [ageing.density(age, reused=reused) for age in (0, 1, 3, 10, 100, 10_000)]
        assert densities == sorted(densities, reverse=True)


def test_in_a_loop_what_is_about_to_come_back_is_worth_most() -> None:
    """Everything comes back after 100 requests: the older, the sooner; beyond that it never does."""
    ageing = Ageing()
    for _ in range(5_000):
        ageing.count(100, reused=True, hit=True)
    assert ageing.density(90, reused=True) > 2 * ageing.density(40, reused=True) > 2 * ageing.density(5, reused=True)
    assert ageing.density(400, reused=True) < ageing.density(40, reused=True)


def test_what_is_used_once_is_told_from_what_comes_back() -> None:
    """A scan beside traffic that comes back soon."""
    ageing = Ageing()
    for _ in range(5_000):
        ageing.count(8, reused=True, hit=True)
        ageing.count(50, reused=False, hit=False)
    assert ageing.density(2, reused=True) > 20 * ageing.density(2, reused=False)


def test_the_past_fades() -> None:
    """After a change of traffic the new ages decide."""
    ageing = Ageing()
    for _ in range(20_000):
        ageing.count(4, reused=True, hit=True)
    for _ in range(20_000):
        ageing.count(500, reused=True, hit=True)
    assert ageing.density(450, reused=True) > ageing.density(2, reused=True)
