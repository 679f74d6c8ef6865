"""The worth of a text by age, learned from uses (jswa/cache/prefix/learned/ageing.py)."""

import numpy as np
from jaxtyping import Int

from jswa.cache.prefix.learned.ageing import LEFT, NEW, USED, Ageing


def nothing() -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """No texts."""
    return np.zeros(0, np.int64), np.zeros(0, np.int64)


def worth(ageing: Ageing, age: int, kind: int = USED) -> float:
    """Return the worth of one text."""
    return float(ageing.worth(np.array([age]), np.array([kind]))[0])


def test_without_statistics_older_texts_are_worth_less() -> None:
    ageing = Ageing()
    for kind in (NEW, USED, LEFT):
        found = [worth(ageing, age, kind) for age in (0, 1, 3, 10, 100, 10_000)]
        assert found == sorted(found, reverse=True)
        assert found[-1] > 0


def test_in_a_loop_a_text_is_worth_more_the_sooner_its_turn_comes() -> None:
    ageing = Ageing()
    for _ in range(500):
        ageing.count(100, USED, used=True)
    ageing.learn(nothing)
    assert worth(ageing, 90) > worth(ageing, 40) > worth(ageing, 5)
    assert worth(ageing, 400) < worth(ageing, 40)


def test_texts_that_nobody_asks_for_teach_that_nobody_will() -> None:
    ageing = Ageing()
    for _ in range(300):
        ageing.count(8, USED, used=True)
        ageing.count(50, LEFT, used=False)
    ageing.learn(nothing)
    assert worth(ageing, 2, USED) > 20 * worth(ageing, 2, LEFT)


def test_texts_that_still_wait_count_as_those_that_reached_their_age() -> None:
    ageing, patient = Ageing(), Ageing()
    for each in (ageing, patient):
        for _ in range(300):
            each.count(8, USED, used=True)
    ageing.learn(nothing)
    patient.learn(lambda: (np.full(3000, 200), np.full(3000, USED)))
    assert worth(patient, 2) < worth(ageing, 2) / 3


def test_the_past_fades() -> None:
    ageing = Ageing()
    for _ in range(20_000):
        ageing.count(4, USED, used=True)
    ageing.learn(nothing)
    for _ in range(10):
        for _ in range(5_000):
            ageing.count(500, USED, used=True)
        ageing.learn(nothing)
    assert worth(ageing, 450) > worth(ageing, 2)
