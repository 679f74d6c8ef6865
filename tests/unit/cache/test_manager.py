"""Pages of leases in chosen situations (jswa/cache/manager.py)."""

import numpy as np

from jswa.cache.manager import CacheManager
from tests.support.builders import make_layout


def test_ids_follow_a_page_that_moves_twice() -> None:
    """Moves apply in order: a page that moved from a to b and then to c is at c."""
    manager = CacheManager(make_layout(1, 4, num_full=1, num_local=6), 6, 30, 1)
    lease = manager.open()
    assert manager.grow(lease, 2)
    first, second = lease.full.held.tolist()
    manager.pool.moves = [(first, 20), (20, 25), (second, first)]
    manager.compact()
    assert lease.full.held.tolist() == [25, first]
    assert manager.drain_moves() == [(first, 20, True), (20, 25, True), (second, first, True)]


def test_pages_are_uploaded_once_with_their_current_ids() -> None:
    """New table entries are the pages since the last plan; moves rename the pages that the device has already."""
    manager = CacheManager(make_layout(4, None, num_full=1, num_local=0), 10, 9, 1)
    lease = manager.open()
    manager.grow(lease, 9)
    full, local = manager.table.take_new()
    assert len(local) == 0
    assert full[:, :2].tolist() == [[lease.row, 0], [lease.row, 1], [lease.row, 2]]
    np.testing.assert_array_equal(full[:, 2], lease.full.held)
    manager.grow(lease, 12)
    assert len(manager.table.take_new()[0]) == 0
    manager.grow(lease, 13)
    assert manager.table.take_new()[0].tolist() == [[lease.row, 3, lease.full.held[3]]]


def test_new_entries_of_rows_that_are_not_asked_for_are_kept_for_later() -> None:
    """They have the ids that the pages have by then."""
    manager = CacheManager(make_layout(4, 8, num_full=1, num_local=1), 10, 20, 3)
    leases = [manager.open() for _ in range(3)]
    for lease in leases:
        manager.grow(lease, 6)
    every = [[lease.row, at, page] for lease in leases for at, page in enumerate(lease.full.held.tolist())]
    full, local = manager.table.take_new(only={leases[1].row})
    assert full.tolist() == every[2:4]
    assert local[:, :2].tolist() == [entry[:2] for entry in every[2:4]]
    assert not len(manager.table.take_new(only={leases[1].row})[0])
    assert manager.table.take_new((leases[0].row,), only={leases[2].row})[0].tolist() == every[4:]
    assert not len(manager.table.take_new()[0])


def test_a_model_without_local_layers_holds_no_local_pages() -> None:
    """Its leases never slide."""
    manager = CacheManager(make_layout(4, None, num_full=1, num_local=0), 10, 9, 1)
    lease = manager.open()
    manager.grow(lease, 30)
    manager.slide(lease, 30)
    assert (len(lease.full.held), len(lease.local.held)) == (8, 0)
    assert lease.held_slots == 8
    manager.check([(lease, 30)])


def test_pages_that_are_reserved_are_allocated_at_once() -> None:
    """What leases grow by later is not free for others; all get their pages, each its own, by one call."""
    manager = CacheManager(make_layout(4, 8, num_full=1, num_local=1), 20, 9, 3)
    leases = [manager.open() for _ in range(3)]
    free = manager.pool.free_slots
    assert manager.grow(leases[0], 9, later=True)
    assert manager.grow(leases[1], 5, later=True)
    assert manager.pool.free_slots == free - leases[0].held_slots - leases[1].held_slots
    assert manager.pool.num_full == manager.pool.num_local == 0
    assert not manager.grow(leases[2], 4 * manager.pool.free_slots, later=True)
    manager.allocate()
    assert manager.pool.num_full == manager.pool.num_local == 5
    assert [len(lease.full.held) for lease in leases] == [3, 2, 0]
    manager.check([(leases[0], 9), (leases[1], 5), (leases[2], 0)])
    manager.grow(leases[2], 1, later=True)
    manager.close(leases[2])
    manager.check([(leases[0], 9), (leases[1], 5)])


def run(manager: CacheManager, tokens: np.ndarray) -> int:
    """Run a text and end it, as one step; return how often the step had to evict."""
    before = manager.prefix.retention.evictions
    lease = manager.open_at(manager.match("", tokens, len(tokens) - 1), length=len(tokens))
    assert lease is not None
    assert manager.grow(lease, len(tokens))
    manager.slide(lease, len(tokens))
    evicted = manager.prefix.retention.evictions - before
    manager.evict_ahead()
    manager.publish(lease, tokens, len(tokens))
    manager.close(lease, tokens)
    return evicted


def test_steps_find_free_memory_that_was_evicted_while_the_step_before_ran() -> None:
    """Once the cache is full, no step evicts, however large the one before: the most that a recent one took is free."""
    manager = CacheManager(make_layout(4, 12, num_full=1, num_local=2), 2_001, 50, 1)
    texts = np.random.default_rng(0).integers(0, 9, (1_000, 40), dtype=np.int32)
    evicted = [run(manager, text[: 40 if number % 20 == 0 else 24]) for number, text in enumerate(texts)]
    assert manager.prefix.retention.evictions > 300
    assert sum(evicted[500:]) == 0
    assert manager.pool.free_slots < manager.pool.total_slots // 32, "much memory is left unused"
    manager.check([])


def test_without_evictable_pages_nothing_is_evicted_ahead() -> None:
    """Rows hold all of the pool."""
    manager = CacheManager(make_layout(4, None, num_full=1, num_local=0), 65, 64, 1)
    lease = manager.open()
    assert manager.grow(lease, 256)
    manager.evict_ahead()
    assert manager.pool.free_slots == 0
    manager.check([(lease, 256)])


def test_the_end_of_a_text_is_evicted_though_a_row_owns_a_local_page_of_it() -> None:
    """A row that starts inside a page may have the full page of one text and the local page of another.

    The page stays with the row until the row gives it up.
    """
    manager = CacheManager(make_layout(4, 12, num_full=1, num_local=2), 50, 50, 1)
    run(manager, np.arange(20, dtype=np.int32))
    (leaf,) = (node for node in manager.prefix.tree.nodes() if node.parent is not None)
    page = leaf.local[-1:].copy()
    manager.pool.retain_local(page)
    manager.prefix.retention.pin(page)
    manager.prefix.retention.cut(leaf, 2)
    assert (manager.pool.local_owners[page].tolist(), manager.pool.local_cached[page].tolist()) == ([1], [False])
    manager.prefix.check()
    manager.pool.check()
    manager.pool.free_local(page)
    manager.pool.check()


def test_a_lease_that_has_pages_ahead_keeps_them() -> None:
    """A row with pages ahead whose text goes on by several known tokens asks for less than it has."""
    manager = CacheManager(make_layout(4, 12, num_full=1, num_local=2), 50, 50, 1)
    lease = manager.open()
    assert manager.grow(lease, 4)
    manager.take_ahead(np.array([lease.row]))
    assert manager.grow(lease, 3)
    assert lease.covered == 8
    manager.close(lease, np.arange(3, dtype=np.int32))
    manager.check([])
