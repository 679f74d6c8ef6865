"""Programs beside the step: copy pages, and set page-table rows of sequences that start on cached pages."""

from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jswa.cache.layout import KVLayout
from jswa.plan import TableRow

WIDTH = 32  # moves per launch
ROWS = 32  # table rows per launch, at most
Lanes = list[Float[Array, "devices slabs elems"]]
Tables = tuple[Int[Array, "max_rows N"], Int[Array, "max_rows N"], Int[Array, " max_rows"]]  # full, local, lengths
UNKNOWN = -1  # the length of a row that has run nothing of its sequence


def copy_pages(lanes: Lanes, moves: Int[Array, "3 width"], *, layout: KVLayout) -> Lanes:
    """Copy slots moves[0] to moves[1] in every lane, all reads before all writes.

    Targets must be distinct. Entries ≥ the number of pages are padding. The lanes are donated.
    """
    source, target, _ = moves
    num_pages = lanes[0].shape[1] * layout.pages_per_slab
    copied = []
    for lane in lanes:
        view = lane.reshape(num_pages, -1)
        contents = view.at[source].get(mode="clip")
        copied.append(view.at[target].set(contents, mode="drop", unique_indices=True).reshape(lane.shape))
    return copied


def rename_pages(
    full_table: Int[Array, "max_rows N"], moves: Int[Array, "3 width"], *, num_pages: int
) -> Int[Array, "max_rows N"]:
    """Name each page moves[0] in the full table as moves[2]: the target if the page moved, the source if it was copied.

    Entries ≥ `num_pages` are padding. The table is donated.
    """
    source, _, name = moves
    renamed = jnp.arange(num_pages, dtype=jnp.int32).at[source].set(name, mode="drop")
    return renamed[full_table]


def set_rows(tables: Tables, rows: Int[Array, "n size"]) -> Tables:
    """Set whole rows of the full and the local page table, and the lengths of these rows to UNKNOWN.

    `rows` comes from `row_batches`. The arrays are donated.
    """
    row_ids, pages = rows[:, 0], rows[:, 1:].reshape(len(rows), 2, -1)
    full, local = (
        table.at[row_ids].set(pages[:, kind], mode="drop", unique_indices=True) for kind, table in enumerate(tables[:2])
    )
    return full, local, tables[2].at[row_ids].set(UNKNOWN, mode="drop", unique_indices=True)


def row_batches(rows: Sequence[TableRow], width: int, max_rows: int) -> Iterator[Int[np.ndarray, "n size"]]:
    """Cut rows into batches of at most `ROWS`, each padded to a power of two with rows that do not exist.

    A row of a batch has row id, full pages and local pages, by absolute page position.
    """
    for start in range(0, len(rows), ROWS):
        some = rows[start : start + ROWS]
        out = np.zeros((1 << (len(some) - 1).bit_length(), 1 + 2 * width), np.int32)
        out[:, 0] = max_rows + np.arange(len(out))
        for line, row in zip(out, some, strict=False):
            line[0] = row.row_id
            line[1 : 1 + len(row.full)] = row.full
            first = 1 + width + row.first_local
            line[first : first + len(row.local)] = row.local
        yield out


def move_batches(moves: Int[np.ndarray, "M 3"], num_pages: int) -> Iterator[Int[np.ndarray, "3 width"]]:
    """Cut moves into padded batches in which no page is both read and written, so that their order does not matter.

    Several copies of one page may share a batch, but not with a move of it.
    """
    batch: list[tuple[int, int, int]] = []
    read: set[int] = set()
    fixed: set[int] = set()  # slots that were written, or whose page moved away
    for source, target, renames in moves.tolist():
        if len(batch) == WIDTH or {source, target} & fixed or target in read or (renames and source in read):
            yield _padded(batch, num_pages)
            batch, read, fixed = [], set(), set()
        batch.append((source, target, target if renames else source))
        read.add(source)
        fixed |= {source, target} if renames else {target}
    if batch:
        yield _padded(batch, num_pages)


def _padded(batch: list[tuple[int, int, int]], num_pages: int) -> Int[np.ndarray, "3 width"]:
    out = np.tile(num_pages + np.arange(WIDTH, dtype=np.int32), (3, 1))
    out[:, : len(batch)] = np.array(batch, np.int32).T
    return out
