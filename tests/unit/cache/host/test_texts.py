"""A tree takes what it lacks of a text that is elsewhere (jswa/cache/host/texts.py)."""

import numpy as np

from jswa.architecture import Reach
from jswa.cache.host.texts import Pages, Taken, take
from jswa.cache.pool import PagePool
from jswa.cache.prefix.cache import PrefixCache
from jswa.cache.prefix.lru import LRU
from tests.support.builders import make_layout

LAYOUT = make_layout(4, Reach(5), num_full=1, num_local=6)
TOKENS = np.arange(10, dtype=np.int32)
SOURCE = Pages(np.array([5, 6, 7]), np.array([0, 20, 40]))  # in slots elsewhere; the first local page is not there


def taken(prefix: PrefixCache, tokens: int, wanted: list[bool]) -> Taken | None:
    """Let a tree take the beginning of the text; the cursor is off the tree again."""
    count = len(wanted)
    source = Pages(SOURCE.full[:count].copy(), SOURCE.local[:count].copy())
    found = take(prefix, "", TOKENS[:tokens], source, np.array(wanted), lambda: None, evict=False)
    if found is not None:
        prefix.detach(found.cursor)
    prefix.pool.check()
    prefix.check()
    return found


def test_a_tree_takes_the_pages_that_it_lacks() -> None:
    """Each slot gets the contents of its own: those of a local page follow each other, here and elsewhere."""
    prefix = PrefixCache(LAYOUT, PagePool(20, LAYOUT.pages_per_slab), LRU)
    found = taken(prefix, 10, [True, True, False])
    assert found is not None
    path, agreed = prefix.tree.walk("", TOKENS)
    full, local = prefix.tree.pages(path, agreed)
    assert agreed == 10
    assert (local != 0).tolist() == [False, True, False]
    wanted = dict(zip(full.tolist(), [5, 6, 7], strict=True))
    wanted |= {6 * int(local[1]) + part: 20 + part for part in range(6)}
    assert dict(zip(found.slots.tolist(), found.sources.tolist(), strict=True)) == wanted
    again = taken(prefix, 10, [True, True, True])
    assert again is not None
    assert again.sources.tolist() == [40, 41, 42, 43, 44, 45]


def test_a_partly_filled_local_page_is_replaced_though_nobody_wants_it() -> None:
    """A window of the tree needs it."""
    prefix = PrefixCache(LAYOUT, PagePool(20, LAYOUT.pages_per_slab), LRU)
    found = taken(prefix, 6, [False, True])
    assert found is not None
    prefix.retention.add_window(found.node, 6)
    assert found.node.windows == {}, "the window sees the first local page too"
    more = taken(prefix, 10, [False, False, False])
    assert more is not None
    assert set(more.sources.tolist()) == {6, 7, *range(20, 26)}


def test_a_text_without_room_is_left_where_it_is() -> None:
    """Nothing changes, also where the beginning of the text would fit."""
    prefix = PrefixCache(LAYOUT, PagePool(2, LAYOUT.pages_per_slab), LRU)
    assert taken(prefix, 10, [False, True, False]) is None
    assert not prefix.tree.roots
    assert prefix.pool.free_slots == 6
    assert taken(prefix, 10, [False, False, False]) is not None
