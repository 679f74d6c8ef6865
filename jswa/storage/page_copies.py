"""Copies pages between the arena and the host while steps go on, a few slots at a time between two steps.

A page may get another owner or a reader before it has been copied. So the engine passes each plan to the copy before
the launch: slots that the step will overwrite are read first, and slots that it will read are written first. Hence a
copy prevents no page from being evicted, and needs no memory of the arena.

`more` and `before_launch` run where the engine's steps run, one at a time; `store` may run in any thread, beside them.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jswa.cache.layout import KVLayout
from jswa.cache.moves import slots_of
from jswa.exec.host_pages import Contents, SlotRunner, keep_rows
from jswa.plan import StepPlan

BATCHES = 4  # batches that may be on their way to the host, each in scratch memory of the device


class Touched(NamedTuple):
    """Slots with contents that a step needs, and slots that it overwrites."""

    read: Int[np.ndarray, " n"]
    written: Int[np.ndarray, " k"]


def touched(plan: StepPlan, layout: KVLayout) -> Touched:
    """Return the slots that a step copies or overwrites, and those of cached pages on which its new rows start."""
    p, m = layout.page_size, layout.pages_per_slab
    indices = {row_id: index for index, row_id in enumerate(plan.row_ids.tolist())}
    none = np.zeros(0, np.int32)
    full, local = [none], [none]
    new_full, new_local = [plan.full_pages[:, 2]], [plan.local_pages[:, 2]]
    for row in plan.table_rows:
        index = indices[row.row_id]
        full.append(row.full)
        local.append(row.local)
        new_full.append(row.full[plan.full_write_from[index] // p :])
        new_local.append(row.local[max(0, plan.starts[index] // p - row.first_local) :])
    read = [plan.moves[:, 0], slots_of(np.concatenate(full), np.concatenate(local), m)]
    written = [plan.moves[:, 1], slots_of(np.concatenate(new_full), np.concatenate(new_local), m)]
    if plan.transfers is not None:
        read.append(plan.transfers.downloads[:, 0])
        written.append(plan.transfers.uploads[:, 1])
    return Touched(np.concatenate(read), np.concatenate(written))


class SlotReading:
    """A copy of slots into rows of `contents`, with the contents that the slots have when this object is made.

    Args:
        sources: the slot of each row.
        num_slots: slots of the arena.
    """

    def __init__(
        self,
        runner: SlotRunner,
        layout: KVLayout,
        sources: Int[np.ndarray, " n"],
        contents: Contents,
        num_slots: int,
    ) -> None:
        self._runner = runner
        self._layout = layout
        self._sources = sources
        self._contents = contents
        self._next = 0
        self._row_of = np.full(num_slots, -1, np.int64)
        self._row_of[sources] = np.arange(len(sources))
        # Several rows may have the same slot, because one of two pages there is about to be moved. Only the last of
        # these rows is read; `finish` copies it to the others.
        self._same = np.flatnonzero(self._row_of[sources] != np.arange(len(sources)))
        self._first = self._row_of[sources[self._same]]
        self._wanted: Bool[np.ndarray, " slots"] = self._row_of >= 0
        self._coming: deque[tuple[Int[np.ndarray, " rows"], Sequence[Any]]] = deque()

    def before_launch(self, plan: StepPlan) -> None:
        """Read the slots that the step will overwrite."""
        written = np.unique(touched(plan, self._layout).written)
        self._launch(written[self._wanted[written]])

    def more(self) -> bool:
        """Start to read a few more slots; return False if no more are left."""
        width = self._runner.slots_per_copy
        while len(self._coming) < BATCHES and self._next < len(self._sources):
            batch = np.unique(self._sources[self._next : self._next + width])
            self._next += width
            self._launch(batch[self._wanted[batch]])
        return self._next < len(self._sources)

    def store(self) -> None:
        """Wait for the slots that are being read, and store them in `contents`."""
        while self._coming:
            try:
                rows, lanes = self._coming.popleft()
            except IndexError:  # the engine's thread has stored the rest meanwhile
                return
            keep_rows(self._contents, rows, [np.asarray(lane)[: len(rows)] for lane in lanes])

    def finish(self) -> None:
        """Complete the contents, once `more` has returned False."""
        self.store()
        for whole in self._contents:
            whole[self._same] = whole[self._first]

    def _launch(self, slots: Int[np.ndarray, " n"]) -> None:
        width = self._runner.slots_per_copy
        for start in range(0, len(slots), width):
            if len(self._coming) >= BATCHES:
                self.store()
            batch = slots[start : start + width]
            self._coming.append((self._row_of[batch], self._runner.read_slots(batch)))
            self._wanted[batch] = False


class Writing:
    """A copy of rows of `contents` to slots, a few at a time; a slot that a step reads is written before the step.

    Args:
        rows: the row of each slot.
        num_slots: slots of the arena.
    """

    def __init__(
        self,
        runner: SlotRunner,
        layout: KVLayout,
        slots: Int[np.ndarray, " n"],
        contents: Contents,
        rows: Int[np.ndarray, " n"],
        num_slots: int,
    ) -> None:
        self._runner = runner
        self._layout = layout
        self._slots = slots
        self._contents = contents
        self._next = 0
        self._row_of = np.full(num_slots, -1, np.int64)
        self._row_of[slots] = rows
        self._pending: Bool[np.ndarray, " slots"] = self._row_of >= 0

    def before_launch(self, plan: StepPlan) -> None:
        """Write the slots that the step will read. Those that it overwrites have new owners and are never written."""
        use = touched(plan, self._layout)
        read = np.unique(use.read)
        self._write(read[self._pending[read]])
        self._pending[use.written] = False

    def more(self) -> bool:
        """Write a few more slots; return False if no more are left."""
        width = self._runner.slots_per_copy
        batch = self._slots[self._next : self._next + width]
        self._next += width
        self._write(batch[self._pending[batch]])
        return self._next < len(self._slots)

    def _write(self, slots: Int[np.ndarray, " n"]) -> None:
        width = self._runner.slots_per_copy
        for start in range(0, len(slots), width):
            batch = slots[start : start + width]
            self._runner.write_slots(batch, self._contents, self._row_of[batch])
            self._pending[batch] = False
