"""Which of many cases run when: some with every change, always the same; the others by night.

A nightly test with more cases than fit a night takes them in turn. The night is a number that TEST_NIGHT gives, the day
otherwise; it is printed below the results, and TEST_NIGHT=NUMBER repeats the choice.
"""

import datetime
import os
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def night() -> int:
    """Return the number of this night. Processes that this one starts get the same, from the environment."""
    today = datetime.datetime.now(datetime.UTC).date().toordinal()
    return int(os.environ.setdefault("TEST_NIGHT", str(today)))


def sample(cases: Sequence[str], every: int, *values: Any) -> list[Any]:
    """Return pytest parameters (a case, then `values`): one in `every` runs with each change, the others nightly.

    The first ones: neighbours, as fixtures of a family share compiled programs.
    """
    few = -(-len(cases) // every)
    return [
        pytest.param(case, *values, marks=() if index < few else pytest.mark.nightly)
        for index, case in enumerate(cases)
    ]


def tonight[Case](cases: Iterable[Case], every: int) -> list[Case]:
    """Return the cases of this night, one in `every`: each has its turn within `every` nights."""
    return [case for index, case in enumerate(cases) if index % every == night() % every]
