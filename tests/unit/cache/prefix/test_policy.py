"""What a victim frees (jswa/cache/prefix/policy.py)."""

import numpy as np

from jswa.cache.manager import CacheManager
from jswa.cache.prefix.policy import pages_freed
from tests.support.builders import make_layout


def test_a_victim_frees_the_pages_that_only_the_tree_owns() -> None:
    """All of a window's, and those at the end of a leaf: a row holds the beginning of the text, and then nothing."""
    manager, text = CacheManager(make_layout(4, 6, num_full=1, num_local=2), 60, 20, 2), np.arange(24, dtype=np.int32)
    lease = manager.open_at(manager.match("", text, 23), length=len(text))
    assert lease is not None
    assert manager.grow(lease, len(text))
    manager.publish(lease, text, len(text))
    (leaf,) = manager.prefix.tree.root("").children.values()
    (window,) = leaf.windows.values()
    assert (pages_freed(manager.prefix.tree, leaf), pages_freed(manager.prefix.tree, window)) == (0, 0)
    manager.close(lease, text)
    assert (pages_freed(manager.prefix.tree, leaf), pages_freed(manager.prefix.tree, window)) == (6, 2)
    half = manager.open_at(manager.match("", text[:8], 8), length=9)
    assert half is not None
    assert pages_freed(manager.prefix.tree, leaf) == 4
    manager.close(half)
    manager.check(())
