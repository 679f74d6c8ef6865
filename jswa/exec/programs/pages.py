"""Programs beside the step: copy pages, and set page-table rows of sequences that start on cached pages."""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jswa.cache.layout import KVLayout
from jswa.exec.programs.state import DeviceState
from jswa.plan import TableRow

WIDTH = 32  # moves per launch


def copy_pages(state: DeviceState, moves: Int[Array, "3 width"], *, layout: KVLayout) -> DeviceState:
    """Copy slots moves[0] to moves[1] in every lane, all reads before all writes.

    Afterwards the full table names page moves[0] as moves[2]: the target if the page moved, the source if it was
    copied. Targets must be distinct. Entries ≥ the number of pages are padding. The state is donated.
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
    """Set a whole row of both page tables; `row` comes from `padded_row`. The state is donated."""
    row_id, pages = row[0], row[1:].reshape(2, -1)
    return {
        **state,
        "full_table": state["full_table"].at[row_id].set(pages[0]),
        "local_table": state["local_table"].at[row_id].set(pages[1]),
    }


def padded_row(row: TableRow, width: int) -> Int[np.ndarray, " size"]:
    """Return row id, full pages and local pages by absolute page position, in one array."""
    out = np.zeros(1 + 2 * width, np.int32)
    out[0] = row.row_id
    out[1 : 1 + len(row.full)] = row.full
    first = 1 + width + row.first_local
    out[first : first + len(row.local)] = row.local
    return out


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
