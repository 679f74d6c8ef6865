"""Leases: parts of a budget that several processes share are granted, given back, and never exceed the whole."""

import asyncio
import random
from collections import Counter

from server.core.fairness import Budget, Key
from server.processes.leases import Leases

KEYS: dict[Key, float] = {"a": 1.0, "b": 1.0}


def pair(budget: Budget) -> list[Leases]:
    """Return the leases of two processes; the budget answers a moment after it was asked."""

    async def ask(key: Key, least: int, wanted: int) -> int:
        await asyncio.sleep(0)
        for amount in (wanted, least):
            if budget.fits(key, amount):
                budget.hold(key, amount)
                return amount
        return 0

    return [Leases(budget.most, ask, budget.release) for _ in range(2)]


def test_claims_of_one_key_at_the_same_time_do_not_refuse_each_other() -> None:
    async def test() -> None:
        leases, _ = pair(Budget(100_000, KEYS))
        assert sorted(await asyncio.gather(*(leases.claim("a", size) for size in (70_000, 30_000)))) == [False, True]
        assert (leases.refused, leases.used) == (1, 70_000)

    asyncio.run(test())


def test_processes_never_have_more_than_the_budget_and_give_all_back() -> None:
    async def test() -> None:
        chance, budget = random.Random(1), Budget(100_000, KEYS)
        both, used = pair(budget), Counter[str]()

        async def work(index: int) -> None:
            for _ in range(100):
                key, size = chance.choice("ab"), chance.randint(1, 30_000)
                if await both[index].claim(key, size):
                    used["whole"] += size
                    assert used["whole"] <= budget.used <= 100_000
                    await asyncio.sleep(0)
                    used["whole"] -= size
                    both[index].release(key, size)

        await asyncio.gather(*(work(number % 2) for number in range(12)))
        await asyncio.sleep(0.15)
        assert (budget.used, *(one.used for one in both)) == (0, 0, 0)

    asyncio.run(test())
