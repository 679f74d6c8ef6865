"""What a watcher of the cache sees: a code for each slot as the pool has them, rows, and edges of the tree."""

import numpy as np

from jswa.cache.manager import CacheManager
from jswa.cache.view import CACHED, FREE, FULL, KEPT, LOCAL, LOCAL_SHARED, SHARED, view
from jswa.config import HostMemory
from server.processes import frames
from tests.support.builders import make_layout


def test_every_slot_has_the_code_of_its_owners() -> None:
    layout = make_layout(4, 8, num_full=1, num_local=2)
    manager, m = CacheManager(layout, 40, 30, 3), layout.pages_per_slab
    assert m == 2
    text = np.arange(20, dtype=np.int32)
    first = manager.open_at(manager.match("", text, 19), length=20)
    assert first is not None
    assert manager.grow(first, 20)
    launched = np.zeros(3, np.int64)
    launched[first.row] = 20
    manager.slide(first, 20)
    assert codes(manager, launched) == {FULL: 5, LOCAL: m * 5, FREE: 80 - 5 - m * 5}, "three pages wait to be published"
    manager.publish(first, text, 20)
    assert codes(manager, launched) == {SHARED: 5, LOCAL_SHARED: m * 2, KEPT: m * 3, FREE: 80 - 5 - m * 5}
    seen = view(manager, launched, 10)
    assert seen.rows.tolist() == [[first.row, 20, 0, 3, 5]]
    assert seen.tree.tolist() == [[-1, 0, 20, 5, 5, 0, 0]]
    assert seen.windows.tolist() == [[0, 20]]
    manager.close(first, text)
    launched[:] = 0
    assert codes(manager, launched) == {CACHED: 5, KEPT: m * 5, FREE: 80 - 5 - m * 5}
    assert view(manager, launched, 0).tree.shape == (0, 7)
    manager.check([])


def test_edges_beyond_the_most_are_counted() -> None:
    manager = CacheManager(make_layout(1, 4, num_full=1, num_local=1), 400, 30, 2)
    for number in range(50):
        text = np.array([7, number, number], np.int32)
        lease = manager.open_at(manager.match("", text, 2), length=3)
        assert lease is not None
        assert manager.grow(lease, 3)
        manager.publish(lease, text, 3)
        manager.close(lease, text)
    seen = view(manager, np.zeros(2, np.int64), 200)
    assert len(seen.tree) == 1 + 40
    assert seen.tree[0].tolist()[:3] == [-1, 0, 1]
    assert seen.tree[0, 6] == 10
    assert np.all(seen.tree[1:, 0] == 0)


def test_host_memory_has_the_codes_of_its_own_pages() -> None:
    layout = make_layout(4, 8, num_full=1, num_local=2)
    manager = CacheManager(layout, 8, 30, 1, memory=HostMemory(20, slots_per_step=8, tokens_per_slot=0.1))
    for number in range(4):
        text = np.full(12, number, np.int32)
        lease = manager.open_at(manager.match("", text, 11), length=12)
        assert lease is not None
        assert manager.grow(lease, 12)
        manager.publish(lease, text, 12)
        manager.close(lease, text)
    seen = view(manager, np.zeros(1, np.int64), 0).host
    assert len(seen) == 20 * layout.pages_per_slab
    assert set(seen.tolist()) == {FREE, CACHED, KEPT}


def codes(manager: CacheManager, launched: np.ndarray) -> dict[int, int]:
    """Return how many slots have each code."""
    found, counts = np.unique(view(manager, launched, 0).slots, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


def test_a_view_crosses_to_another_process() -> None:
    manager = CacheManager(make_layout(4, 8, num_full=1, num_local=2), 40, 30, 3)
    lease = manager.open()
    assert manager.grow(lease, 9)
    seen = view(manager, np.array([9, 0, 0]), 5)
    again = frames.unpacked_view(frames.packed_view(seen))
    assert again.geometry == seen.geometry
    for one, other in zip(again[1:6], seen[1:6], strict=True):
        np.testing.assert_array_equal(one, other)
