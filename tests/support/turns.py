"""Cases that a test run takes by turns: too many for every run, and too valuable to run only nightly.

The turn is a number drawn from the commit (the date outside of a git checkout). It is printed below the results, and
TEST_TURN=NUMBER repeats it.

    python -m tests.support.turns EVERY PATH…    prints the paths that have their turn
"""

import datetime
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest


def turn() -> int:
    """Return this run's turn. Processes that this one starts get the same, from the environment."""
    if "TEST_TURN" not in os.environ:
        here = Path(__file__).parent
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
        today = datetime.datetime.now(datetime.UTC).date().toordinal()
        os.environ["TEST_TURN"] = str(today if head.returncode else int(head.stdout[:4], 16))
    return int(os.environ["TEST_TURN"])


def has_turn(index: int, every: int) -> bool:
    """Return whether case number `index` has its turn in this run; every case has one in `every` runs."""
    return index % every == turn() % every


def in_turn[Test: Callable[..., object]](index: int, every: int) -> Callable[[Test], Test]:
    """Return the decorator of a test that runs in turn `index` of `every`, and nightly in all turns."""

    def decorate(test: Test) -> Test:
        return test if has_turn(index, every) else pytest.mark.nightly(test)

    return decorate


def whose_turn[Case](cases: Iterable[Case], every: int) -> list[Case]:
    """Return the cases that have their turn: for nightly tests with more cases than fit a night."""
    return [case for index, case in enumerate(cases) if has_turn(index, every)]


def by_turns(cases: Sequence[str], every: int, *values: Any) -> list[Any]:
    """Return pytest parameters (a case, then `values`): each runs in one turn of `every`, and nightly in all turns.

    A turn has neighbouring cases: fixtures of a family share compiled programs.
    """
    now = turn() % every
    return [
        pytest.param(case, *values, marks=() if index * every // len(cases) == now else pytest.mark.nightly)
        for index, case in enumerate(cases)
    ]


if __name__ == "__main__":
    print(*whose_turn(sys.argv[2:], int(sys.argv[1])))
