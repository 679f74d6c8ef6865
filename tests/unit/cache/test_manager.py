"""Pages of leases in chosen situations (jswa/cache/manager.py)."""

import numpy as np

from jswa.cache.manager import CacheManager
from tests.support.builders import make_layout


def test_ids_follow_a_page_that_moves_twice() -> None:
    """Moves apply in order: a page that moved from a to b and then to c is at c."""
    manager = CacheManager(make_layout(1, 4, num_full=1, num_local=6), 6, 30)
    lease = manager.open()
    assert manager.grow(lease, 2)
    first, second = lease.full.held.tolist()
    manager.pool.moves = [(first, 20), (20, 25), (second, first)]
    manager.compact()
    assert lease.full.held.tolist() == [25, first]
    assert manager.drain_moves() == [(first, 20, True), (20, 25, True), (second, first, True)]


def test_pages_are_uploaded_once_with_their_current_ids() -> None:
    """New table entries are the pages since the last plan; moves rename the pages that the device has already."""
    manager = CacheManager(make_layout(4, None, num_full=1, num_local=0), 10, 9)
    lease = manager.open()
    manager.grow(lease, 9)
    positions, ids = lease.full.pop_unsent()
    assert list(positions) == [0, 1, 2]
    np.testing.assert_array_equal(ids, lease.full.held)
    manager.grow(lease, 12)
    assert len(lease.full.pop_unsent()[0]) == 0
    manager.grow(lease, 13)
    positions, ids = lease.full.pop_unsent()
    assert (list(positions), ids.tolist()) == ([3], [lease.full.held[3]])


def test_a_model_without_local_layers_holds_no_local_pages() -> None:
    """Its leases never slide."""
    manager = CacheManager(make_layout(4, None, num_full=1, num_local=0), 10, 9)
    lease = manager.open()
    manager.grow(lease, 30)
    manager.slide(lease, 30)
    assert (len(lease.full.held), len(lease.local.held)) == (8, 0)
    assert manager.held_slots(lease) == 8
    manager.check([(lease, 30)])
