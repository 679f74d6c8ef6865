"""All combinations of head sizes, windows, page sizes, groups and lengths, for nightly runs of the kernels."""

from collections.abc import Iterator

from tools.cases.kernels.attention import Case, RowSpec


def matrix() -> Iterator[Case]:
    """Yield decode cases: head sizes × windows × page sizes × groups, with rows that end around boundaries."""
    for head_dim, v_dim in ((64, 64), (128, 128), (192, 128), (256, 256)):
        for window in (1, 63, 64, 65, 128, 1024, None):
            for page in (16, 64, 128):
                for group in (1, 4, 5, 8, 16):
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
    for head_dim, v_dim in ((64, 64), (128, 128), (192, 128), (256, 256)):
        for window in (1, 64, 129, 1024, None):
            for page in (16, 64, 128):
                for group in (1, 2, 5, 8):
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
