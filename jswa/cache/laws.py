"""Laws that tie leases, pool and prefix cache together, asserted by `CacheManager.check`."""

from collections.abc import Collection, Mapping

import numpy as np

from jswa.cache.host.texts import Pages
from jswa.cache.layout import KVLayout
from jswa.cache.lease import NEVER, Lease, LeaseTable, held
from jswa.cache.pool import PagePool
from jswa.cache.prefix.cache import PrefixCache


def check_leases(
    layout: KVLayout,
    leases: Collection[Lease],
    waiting: Collection[Lease],
    launched: dict[Lease, int],
    ahead: Mapping[Lease, tuple[int, int]],
) -> None:
    """Assert that each lease has exactly the pages of its launched length.

    Those of `ahead` have the window of their launched length, and pages up to the first number, at most to the second.

    Args:
        waiting: the leases with pages that have left the window and wait to be published.
        ahead: leases whose rows may have run further.
    """
    assert set(launched) == set(leases), "leases are open that no sequence holds, or the reverse"
    for lease, length in launched.items():
        least, most = (-(-end // layout.page_size) for end in ahead.get(lease, (length, length)))
        assert least <= lease.covered // layout.page_size <= most, "pages end before or after the launched length"
        assert (lease in waiting) == (lease.unpublished < lease.local.start)
        if layout.reach is not None:
            first = max(layout.reach.first_visible(length), lease.local_visible_from) // layout.page_size
            assert lease.local.start == first, "local pages are not exactly the window"
            assert lease.table.next_slide[lease.row] > length, "a page has left the window and is still held"
            assert len(lease.local.held) <= layout.window_pages(length) + 1 + most - -(-length // layout.page_size)


def check_table(table: LeaseTable, leases: Collection[Lease]) -> None:
    """Assert that each row has one of the leases, or is free and empty."""
    assert {lease.row: lease for lease in leases} == {row: own for row, own in enumerate(table.owners) if own}
    free = np.ones(len(table.owners), bool)
    free[[lease.row for lease in leases]] = False
    assert sorted(table.free) == free.nonzero()[0].tolist(), "a row is lost"
    for array in (table.covered, table.shared, table.first_local, table.unpublished):
        assert not array[free].any(), "a row without a lease has a value"
    assert np.all(table.next_slide[free] == NEVER)
    new = np.array(table.new_full + table.new_local, np.int64) // table.full.shape[1]
    assert not free[new].any(), "a row without a lease has new pages"


def check_owners(pool: PagePool, leases: Collection[Lease], others: Collection[Pages] = ()) -> None:
    """Assert that the pool counts as owners of a page the leases and the others that hold it, and the cache."""
    for kind in ("full", "local"):
        owners = np.zeros(len(getattr(pool, f"{kind}_owners")), np.int32)
        for lease in leases:
            pages = held(lease, kind)
            assert len(pages) == len(np.unique(pages)), "a lease holds a page twice"
            owners[pages] += 1
        for other in others:
            np.add.at(owners, getattr(other, kind), getattr(other, kind) > 0)
        owners += getattr(pool, f"{kind}_cached")
        assert np.array_equal(owners, getattr(pool, f"{kind}_owners")), f"owners of {kind} pages are miscounted"


def check_cursors(layout: KVLayout, prefix: PrefixCache, leases: Collection[Lease]) -> None:
    """Assert that the tree has the pages of the leases as far as they are published."""
    for lease in leases:
        assert lease.cursor.node is not None
        assert lease.cursor in lease.cursor.node.cursors
        whole = lease.cursor.published // layout.page_size if layout.full and not lease.cursor.detached else 0
        path = prefix.tree.page_ids(lease.cursor.node, "full", 0, whole)
        assert np.array_equal(path, lease.full.ids[:whole]), "published pages are not those of the tree"
