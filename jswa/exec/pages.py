"""`copy_pages`: the one program family beside the step. Carries out the pool's compaction on the device."""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jswa.cache.layout import KVLayout
from jswa.exec.state import DeviceState

WIDTH = 32  # moves per launch


def copy_pages(state: DeviceState, moves: Int[Array, "2 width"], *, layout: KVLayout) -> DeviceState:
    """Copy full pages moves[0] to moves[1] in every lane, all reads before all writes, and rename them in the table.

    Destinations must be distinct. Entries ≥ the number of pages are padding. The state is donated.
    """
    source, target = moves
    num_pages = state["lanes"][0].shape[1] * layout.pages_per_block
    lanes = []
    for lane in state["lanes"]:
        view = lane.reshape(num_pages, -1)
        copied = view.at[source].get(mode="clip")
        lanes.append(view.at[target].set(copied, mode="drop", unique_indices=True).reshape(lane.shape))
    renamed = jnp.arange(num_pages, dtype=jnp.int32).at[source].set(target, mode="drop")
    return {**state, "lanes": lanes, "full_table": renamed[state["full_table"]]}


def move_batches(moves: Int[np.ndarray, "M 2"], num_pages: int) -> Iterator[Int[np.ndarray, "2 width"]]:
    """Cut moves into padded batches in which no page is both read and written, so that order within one is free."""
    batch: list[tuple[int, int]] = []
    touched: set[int] = set()
    for source, target in moves.tolist():
        if len(batch) == WIDTH or source in touched or target in touched:
            yield _padded(batch, num_pages)
            batch, touched = [], set()
        batch.append((source, target))
        touched |= {source, target}
    if batch:
        yield _padded(batch, num_pages)


def _padded(batch: list[tuple[int, int]], num_pages: int) -> Int[np.ndarray, "2 width"]:
    out = np.tile(num_pages + np.arange(WIDTH, dtype=np.int32), (2, 1))
    out[:, : len(batch)] = np.array(batch, np.int32).T
    return out
