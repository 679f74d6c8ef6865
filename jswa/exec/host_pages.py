"""Contents of pages in host memory, and their copies from the device and back.

A step has three moments (`Transfers`): before the launch pages are read, as the last step has left them, and go to the
host while steps run; after the launch pages are written, which thus come to the device while the step runs. The order
is a data dependence: each program consumes the arrays of the one before.
"""

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Shaped

from jswa.plan import Transfers

_log = logging.getLogger("jswa")
_MOST = 4  # batches that may be on their way to the host, each in scratch memory of the device
Part = tuple[Int[np.ndarray, " _"], Sequence[Any]]  # slots here (-1: taken by others meanwhile), lanes to come
Contents = list[Shaped[np.ndarray, "slots elems"]]  # by lane, and in each lane by device


@runtime_checkable
class SlotRunner(Protocol):
    """A runner that copies slots (1/m slab) to the host and back."""

    @property
    def slots_per_copy(self) -> int:
        """Slots that one call of `read_slots` or `write_slots` takes at most."""
        ...

    def move(self, moves: Int[np.ndarray, "M 3"]) -> None:
        """Carry out moves of slots within the device, outside of a plan."""
        ...

    def read_slots(self, ids: Int[np.ndarray, " n"]) -> Sequence[Any]:
        """Return at least n slots for each lane, as the last launched step leaves them. They may still be computed."""
        ...

    def write_slots(self, ids: Int[np.ndarray, " n"], contents: Contents, rows: Int[np.ndarray, " n"]) -> None:
        """Overwrite each slot with a row of `contents`; the next step sees it."""
        ...


def keep_rows(contents: Contents, rows: Int[np.ndarray, " n"], lanes: Sequence[Shaped[np.ndarray, "n _"]]) -> None:
    """Store slots in rows of `contents`, from lanes in which those of several devices lie side by side."""
    each = len(contents) // len(lanes)
    for number, lane in enumerate(lanes):
        parts = np.split(lane, each, axis=1)
        for whole, part in zip(contents[number * each : (number + 1) * each], parts, strict=True):
            whole[rows] = part


class Landed(NamedTuple):
    """Batches of downloads that are complete, and whether the contents of any were lost."""

    batches: int
    lost: bool


class HostPages:
    """Owns the contents. One thread calls it, the engine's.

    Args:
        contents: memory for the slots, by lane and in each lane by device.
    """

    def __init__(self, runner: SlotRunner, contents: Contents) -> None:
        self._runner = runner
        self._contents = contents
        self._lost = False
        self._coming: deque[list[Part]] = deque()  # the parts of each batch of downloads

    def before_launch(self, transfers: Transfers) -> None:
        """Move slots here, exchange slots with the disk, and begin to read slots of the device."""
        self._change(transfers)
        for save in transfers.saves:
            save.keep([lane[save.slots] for lane in self._contents])
        if not len(transfers.downloads):
            return
        width, batch = self._runner.slots_per_copy, list[Part]()
        self._coming.append(batch)
        for start in range(0, len(transfers.downloads), width):
            if sum(map(len, self._coming)) >= _MOST:
                self._store(next(batch for batch in self._coming if batch))
            part = transfers.downloads[start : start + width]
            batch.append((part[:, 1].copy(), self._runner.read_slots(part[:, 0])))

    def move(self, moves: Int[np.ndarray, "M 3"]) -> None:
        """Carry out moves of slots within the device that no launch carries out."""
        self._runner.move(moves)

    def after_launch(self, transfers: Transfers) -> None:
        """Write slots of the device, for the steps after the one that was launched."""
        width = self._runner.slots_per_copy
        for start in range(0, len(transfers.uploads), width):
            part = transfers.uploads[start : start + width]
            self._runner.write_slots(part[:, 1], self._contents, part[:, 0])

    def land(self) -> Landed:
        """Store the pages that have arrived, without waiting."""
        batches = 0
        while self._coming:
            batch = self._coming[0]
            while batch and all(getattr(lane, "is_ready", lambda: True)() for lane in batch[0][1]):
                self._store(batch)
            if batch:
                break
            self._coming.popleft()
            batches += 1
        lost, self._lost = self._lost, False
        return Landed(batches, lost)

    def _change(self, transfers: Transfers) -> None:
        """Carry out moves, and writes from the disk. Copies on their way follow a move, and are void under a write."""
        for source, target in transfers.moves.tolist():
            for lane in self._contents:
                lane[target] = lane[source]
            for slots, _ in (part for batch in self._coming for part in batch):
                slots[slots == target] = -1
                slots[slots == source] = target
        for write in transfers.writes:
            for whole, lane in zip(self._contents, write.lanes, strict=True):
                whole[write.slots] = lane[write.rows]
            for slots, _ in (part for batch in self._coming for part in batch):
                slots[np.isin(slots, write.slots)] = -1

    def _store(self, batch: list[Part]) -> None:
        """Wait for the first part of a batch, and keep it."""
        slots, lanes = batch.pop(0)
        kept = np.flatnonzero(slots >= 0)
        try:
            arrays = [np.asarray(lane) for lane in lanes]
        except Exception:  # whatever a device raises
            _log.exception("pages were lost on their way to host memory: what it holds is forgotten")
            self._lost = True
            return
        keep_rows(self._contents, slots[kept], [lane[kept] for lane in arrays])
