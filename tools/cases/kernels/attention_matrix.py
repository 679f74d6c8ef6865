"""Combinations of head sizes, windows, page sizes and groups, for nightly runs of the kernels and for a GPU.

All combinations are 660 cases, too many for the minutes that a GPU is there. A covering array has each pair of values
of two parameters in some case: 56 cases.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from tools.cases.kernels.attention import Case, RowSpec

_HEADS = ((64, 64), (128, 128), (192, 128), (256, 256))
_PAGES = (16, 64, 128)
_DECODE = (_HEADS, (1, 63, 64, 65, 128, 1024, None), _PAGES, (1, 4, 5, 8, 16))
_PREFILL = (_HEADS, (1, 64, 129, 1024, None), _PAGES, (1, 2, 5, 8))


def covering(factors: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Return few combinations of one value per factor, such that each pair of values of two factors is in one of them.

    Greedy: the next combination is the first of those that have most new pairs.
    """

    def pairs(combination: tuple[Any, ...]) -> set[tuple[Any, ...]]:
        return set(itertools.combinations(enumerate(combination), 2))

    left = {combination: pairs(combination) for combination in itertools.product(*factors)}
    missing = set().union(*left.values())
    out = []
    while missing:
        best = max(left, key=lambda combination: len(left[combination] & missing))
        missing -= left.pop(best)
        out.append(best)
    return out


def matrix() -> Iterator[Case]:
    """Yield decode cases: head sizes × windows × page sizes × groups, with rows that end around boundaries."""
    for (head_dim, v_dim), window, page, group in covering(_DECODE):
        longest = 1100 if window == 1024 else 3 * page + 5
        lengths = sorted({1, page - 1, page, page + 1, window or 1, (window or 1) + 1, longest})
        rows = (*(RowSpec(length - 1, 1) for length in lengths if length <= longest), RowSpec(0, 0))
        yield Case(
            f"{head_dim}/{v_dim}, window {window}, page {page}, group {group}",
            (rows,),
            len(rows),
            page,
            window=window,
            heads=(group, 1, head_dim, v_dim),
            tile=1,
            dtype="bfloat16",
        )


def prefill_matrix() -> Iterator[Case]:
    """Yield prefill cases: head sizes × windows × page sizes × groups, with rows that begin or end at boundaries."""
    for (head_dim, v_dim), window, page, group in covering(_PREFILL):
        tile = 128 // group
        late = RowSpec(1100 if window == 1024 else (window or 1) - 1, 7)
        rows = (RowSpec(page - 1, tile + 1), RowSpec(2 * page, tile), RowSpec(0, 1), RowSpec(0, 0), late)
        yield Case(
            f"prefill, {head_dim}/{v_dim}, window {window}, page {page}, group {group}",
            (rows,),
            sum(row.count for row in rows) + 3,
            page,
            window=window,
            heads=(group, 1, head_dim, v_dim),
            tile=tile,
            dtype="bfloat16",
        )
