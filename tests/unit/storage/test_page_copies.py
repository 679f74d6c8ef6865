"""Pages are copied to the host and back while steps go on (jswa/storage/page_copies.py), on the fake device."""

from typing import Any

import numpy as np
from hypothesis import event, given
from hypothesis import strategies as st
from jaxtyping import Int

from jswa.architecture import Reach
from jswa.cache.moves import origins
from jswa.storage.page_copies import SlotReading, Writing
from jswa.storage.restore import restore
from jswa.storage.snapshot import Captured, capture
from tests.support.builders import LAYOUTS, share
from tests.support.loops.loop import Loop
from tests.unit.storage.test_snapshot import SHAPES, Traffic, make_loop, read

shapes = given(
    layers=st.sampled_from(list(LAYOUTS.values())),
    shape=st.sampled_from(SHAPES),
    slabs=st.integers(8, 60),
    seed=st.integers(0, 2**32 - 1),
)


def slots(loop: Loop) -> int:
    """Return the slots of a loop's arena."""
    return len(loop.runner.memory[0])


def room(loop: Loop, count: int) -> list[Int[np.ndarray, "n p"]]:
    """Return contents for so many slots, which hold garbage."""
    return [np.full((count, array.shape[1]), -7, array.dtype) for array in loop.runner.memory]


def begin_reading(loop: Loop) -> tuple[Captured, list[Int[np.ndarray, "n p"]], SlotReading]:
    """Capture the cache, and begin to read its pages."""
    cache = loop.scheduler.cache
    taken = capture(cache.prefix, "")
    contents = room(loop, len(taken.slots))
    reading = SlotReading(loop.runner, loop.runner.layout, origins(cache.moves, taken.slots), contents, slots(loop))
    loop.before_launch = reading.before_launch
    return taken, contents, reading


def disturb(traffic: Traffic) -> None:
    """Do what other requests may do between two batches: run, end, be aborted, push texts out of the cache."""
    scheduler, rng = traffic.loop.scheduler, traffic.rng
    traffic.send(int(rng.integers(0, 3)), drain=False)
    running = list(scheduler.sequences)
    if running and rng.random() < 0.3:
        scheduler.abort(running[rng.integers(len(running))])
    if rng.random() < 0.05:
        scheduler.cache.flush()
    for _ in range(int(rng.integers(0, 3))):
        traffic.step()


def assert_same_text(loop: Loop, taken: Captured, one: Any, other: Any) -> None:
    """Assert that two contents of a snapshot agree wherever a page has text; behind it a row may write."""
    full, local = taken.filled
    for (mine, theirs), is_full in zip(zip(one, other, strict=True), (True, False, False, True, False), strict=True):
        first = 0 if is_full else len(full)
        lengths = full if is_full else np.repeat(local, loop.runner.layout.pages_per_slab)
        for row, length in enumerate(lengths.tolist(), start=first):
            assert mine[row, :length].tolist() == theirs[row, :length].tolist()


@share(16)
@shapes
def test_a_saved_page_is_that_of_the_beginning(
    layers: tuple[int, int], shape: tuple[int, Reach], slabs: int, seed: int
) -> None:
    """However much is evicted, slid, aborted, moved and overwritten before all pages are read."""
    loop = make_loop(layers, shape, slabs)
    traffic = Traffic(loop, np.random.default_rng(seed))
    traffic.send(10, drain=False)
    taken, contents, reading = begin_reading(loop)
    before, steps = read(loop, taken.slots), loop.runner.launches
    while reading.more():
        if traffic.rng.random() < 0.7:
            reading.store()
        disturb(traffic)
    loop.before_launch = None
    disturb(traffic)
    reading.finish()
    assert_same_text(loop, taken, contents, before)
    event(f"steps meanwhile: {min(10, (loop.runner.launches - steps) // 4 * 4)}")
    event(f"pages lost meanwhile: {any((a != b).any() for a, b in zip(read(loop, taken.slots), before, strict=True))}")
    traffic.send(2)


@share(16)
@shapes
def test_a_loaded_page_is_there_before_it_is_read(
    layers: tuple[int, int], shape: tuple[int, Reach], slabs: int, seed: int
) -> None:
    """Rows that hit it before its turn get the right KV (the device checks); one that took its memory keeps it."""
    rng = np.random.default_rng(seed)
    first, second = make_loop(layers, shape, 200), make_loop(layers, shape, slabs)
    traffic = Traffic(first, rng)
    traffic.send(12)
    taken, contents, reading = begin_reading(first)
    while reading.more():
        reading.store()
    reading.finish()
    other = Traffic(second, rng, list(traffic.texts))
    other.send(int(rng.integers(0, 4)), drain=False)
    cache = second.scheduler.cache
    done = restore(cache, "", taken.texts)
    second.runner.move(np.array(cache.drain_moves(), np.int32).reshape(-1, 3))
    writing = Writing(second.runner, second.runner.layout, done.slots, contents, done.rows, slots(second))
    second.before_launch = writing.before_launch
    steps = second.runner.launches
    while writing.more():
        disturb(other)
    second.before_launch = None
    event(f"steps meanwhile: {min(10, (second.runner.launches - steps) // 4 * 4)}")
    other.send(8)


def test_a_page_that_nobody_overwrites_is_read_once() -> None:
    """In as many batches as there is room for, however many steps run meanwhile."""
    loop = make_loop((1, 1), (4, Reach(5)), 100)
    traffic = Traffic(loop, np.random.default_rng(3))
    traffic.send(12)
    seen: list[int] = []
    read_slots = loop.runner.read_slots

    def counted(ids: Int[np.ndarray, " n"]) -> Any:
        seen.extend(ids.tolist())
        return read_slots(ids)

    loop.runner.read_slots = counted  # type: ignore[method-assign]
    taken, _, reading = begin_reading(loop)
    while reading.more():
        reading.store()
        disturb(traffic)
    assert sorted(seen) == sorted(taken.slots.tolist())
