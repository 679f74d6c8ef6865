"""Slots that the device copies before a step."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int


class Move(NamedTuple):
    """A slot to copy. `rename`: page tables that name the source name the target from then on."""

    source: int
    target: int
    rename: bool


def origins(moves: list[Move], slots: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """Return the slots that hold the contents of `slots` now, before `moves` are carried out."""
    if not moves:
        return slots.astype(np.int32)
    came_from: dict[int, int] = {}
    for source, target, _ in moves:
        came_from[target] = came_from.get(source, source)
    return np.array([came_from.get(slot, slot) for slot in slots.tolist()], np.int32)


def destinations(moves: list[tuple[int, int]], slots: int) -> Int[np.ndarray, " slots"]:
    """Return where the contents of each slot are after moves (source, target), in their order."""
    found = np.arange(slots, dtype=np.int32)
    came_from: dict[int, int] = {}
    for source, target in moves:
        origin = came_from.pop(source, source)
        came_from[target] = origin
        found[origin] = target
    return found


def slots_of(
    full: Int[np.ndarray, " n"], local: Int[np.ndarray, " k"], pages_per_slab: int
) -> Int[np.ndarray, " slots"]:
    """Return the slots of full pages, then those of local pages."""
    return np.concatenate([full, (local[:, None] * pages_per_slab + np.arange(pages_per_slab)).reshape(-1)])


def rename[T](by_slot: dict[int, T], source: int, target: int) -> None:
    """Follow a slot that has moved; an entry for its new place is void."""
    by_slot.pop(target, None)
    if source in by_slot:
        by_slot[target] = by_slot.pop(source)
