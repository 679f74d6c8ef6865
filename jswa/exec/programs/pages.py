"""The programs beside the step that keep arena and page tables: copies of pages, and rows that start on cached ones."""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jswa.cache.layout import KVLayout
from jswa.exec.programs.state import DeviceState
from jswa.plan import TableRow

WIDTH = 32  # moves per launch


def copy_pages(state: DeviceState, moves: Int[Array, "3 width"], *, layout: KVLayout) -> DeviceState:
    """Copy slots of 1/m block moves[0] to moves[1] in every lane, all reads before all writes.

    A slot is a full page; a local page is m of them. Full pages moves[0] are called moves[2] in the tables afterwards:
    the target where a page has moved, the source where it was copied. Targets must be distinct. Entries ≥ the number
    of pages are padding. The state is donated.
    """
    source, target, name = moves
    num_pages = state["lanes"][0].shape[1] * layout.pages_per_block
    lanes = []
    for lane in state["lanes"]:
        view = lane.reshape(num_pages, -1)
        copied = view.at[source].get(mode="clip")
        lanes.append(view.at[target].set(copied, mode="drop", unique_indices=True).reshape(lane.shape))
    renamed = jnp.arange(num_pages, dtype=jnp.int32).at[source].set(name, mode="drop")
    return {**state, "lanes": lanes, "full_table": renamed[state["full_table"]]}


def set_row(state: DeviceState, row: Int[Array, " size"]) -> DeviceState:
    """Enter a whole row, as `padded_row` makes it, in both page tables. The state is donated."""
    row_id, pages = row[0], row[1:].reshape(2, -1)
    return {
        **state,
        "full_table": state["full_table"].at[row_id].set(pages[0]),
        "local_table": state["local_table"].at[row_id].set(pages[1]),
    }


def padded_row(row: TableRow, width: int) -> Int[np.ndarray, " size"]:
    """Slot, full pages and local pages by absolute page position, in one array."""
    out = np.zeros(1 + 2 * width, np.int32)
    out[0] = row.row_id
    out[1 : 1 + len(row.full)] = row.full
    first = 1 + width + row.first_local
    out[first : first + len(row.local)] = row.local
    return out


def move_batches(moves: Int[np.ndarray, "M 3"], num_pages: int) -> Iterator[Int[np.ndarray, "3 width"]]:
    """Cut moves into padded batches in which no page is both read and written, so that order within one is free.

    Several copies of one page may share a batch, but not with a move of it.
    """
    batch: list[tuple[int, int, int]] = []
    read: set[int] = set()
    fixed: set[int] = set()  # written, or moved away
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
