"""Work of the prefix cache where it could grow: long texts, many tenants, many prompts of one text."""

import numpy as np
import pytest

from jswa.cache.lease import Lease
from jswa.cache.manager import CacheManager
from jswa.cache.prefix.stats import for_clients
from jswa.types import MissReason
from tests.support.builders import make_layout

PAGE = 4
LAYOUT = make_layout(PAGE, 6, num_full=1, num_local=2)


def make_manager(slabs: int = 4000, width: int = 2000) -> CacheManager:
    """Return a cache with memory for all texts of a test."""
    return CacheManager(LAYOUT, slabs, width, 8)


def publish(manager: CacheManager, salt: str, tokens: np.ndarray, chunk: int = 64) -> Lease:
    """Run a row over a text in chunks, and end it."""
    match = manager.match(salt, tokens, len(tokens) - 1)
    lease = manager.open_at(match, salt, len(tokens))
    assert lease is not None
    launched = match.resume.start
    while launched < len(tokens):
        launched = min(len(tokens), launched + chunk)
        assert manager.grow(lease, launched)
        manager.slide(lease, launched)
        manager.publish(lease, tokens, launched)
    manager.close(lease, tokens)
    manager.drain_moves()
    return lease


def windows(manager: CacheManager) -> int:
    """Return the number of windows that the cache keeps."""
    return manager.stats().windows


def test_a_text_that_grows_chunk_by_chunk_is_copied_a_few_times_in_all() -> None:
    """500 chunks: its arrays move once per doubling of their size. A trimmed text does not keep their room."""
    manager, text = make_manager(), np.arange(2000, dtype=np.int32)
    lease = manager.open()
    places: dict[int, object] = {}
    lease.window_ends = [len(text)]
    manager.prefix.start(lease, manager.match("", text, 0))
    for end in range(PAGE, len(text) + 1, PAGE):
        assert manager.grow(lease, end)
        manager.slide(lease, end)
        manager.publish(lease, text, end)
        (node,) = manager.prefix.tree.root("").children.values()
        assert np.array_equal(node.tokens, text[:end])
        places[id(node.buffers)] = node.buffers
    assert len(places) <= 12
    manager.close(lease, text)
    (node,) = manager.prefix.tree.root("").children.values()
    manager.prefix.retention.cut(node, len(node.full) - 2)
    assert np.array_equal(node.tokens, text[: 2 * PAGE])
    assert node.tokens.base is None
    manager.check([])


def test_a_miss_costs_the_same_for_any_number_of_tenants() -> None:
    """The reason "salt" is found without a walk over other tenants' trees, for the first and the last of them."""
    manager = make_manager()
    for tenant in range(200):
        publish(manager, f"tenant {tenant}", np.arange(tenant, tenant + 12, dtype=np.int32))
    before = manager.prefix.tree.visits
    for first, reason in ((0, "salt"), (199, "salt"), (1000, "cold")):
        text = np.arange(first, first + 12, dtype=np.int32)
        assert manager.match("new", text, 11).reason == reason
    assert manager.match("tenant 0", np.arange(500, 512, dtype=np.int32), 11).reason == "cold"
    assert manager.prefix.tree.visits == before


def test_a_prompt_that_comes_again_is_no_place_where_texts_part() -> None:
    """Its match ends one token before its end, and goes on as it does."""
    manager, text = make_manager(), np.arange(40, dtype=np.int32)
    publish(manager, "", text)
    count = windows(manager)
    for _ in range(5):
        assert not manager.match("", text, len(text) - 1).branch
        publish(manager, "", text)
    assert windows(manager) <= count + 1
    other = np.concatenate([text[:20], text[:20]])
    assert manager.match("", other, len(other) - 1).branch


@pytest.mark.parametrize("order", ["longer", "shorter", "random"])
def test_prompts_of_every_length_of_a_text_keep_a_bounded_number_of_windows(order: str) -> None:
    """As loops that score a document token by token do."""
    manager, text = make_manager(), np.random.default_rng(3).integers(0, 9, 400).astype(np.int32)
    lengths = np.arange(20, 400)
    lengths = lengths[::-1] if order == "shorter" else lengths
    lengths = np.random.default_rng(4).permutation(lengths) if order == "random" else lengths
    for length in lengths.tolist():
        publish(manager, "", text[:length])
    manager.check([])
    assert windows(manager) <= len(text) // PAGE + 2


def test_a_window_is_evicted_whose_last_page_lies_in_an_edge_below() -> None:
    """Where texts part inside a page, the page is the lower edge's. A page that is freed is in no edge any more."""
    manager, common = make_manager(60, 20), np.arange(10, dtype=np.int32)
    for first, length in ((0, 0), (100, 30), (200, 60)):
        publish(manager, "", np.concatenate([common, np.arange(first, first + length, dtype=np.int32)]))
    (upper,) = manager.prefix.tree.root("").children.values()
    assert len(upper.children) == 2
    assert upper.local[-1] == 0 != upper.windows[10].slabs[-1]
    while manager.pool.evictable_slots:
        manager.prefix.retention.make_room(manager.pool.free_slots + 1)
        manager.check([])
    assert manager.pool.free_slots == manager.pool.total_slots


def test_clients_cannot_tell_what_another_salt_has_cached_from_what_nobody_has() -> None:
    missed: dict[MissReason, int] = {"salt": 3, "cold": 4, "evicted": 5}
    assert for_clients(missed) == {"cold": 7, "evicted": 5}
    assert for_clients({"salt": 3}) == for_clients({"cold": 3}) == {"cold": 3}
    assert missed["salt"] == 3


def test_a_place_counts_the_rows_that_started_there() -> None:
    manager = make_manager()
    text = np.arange(40, dtype=np.int32)
    for _ in range(3):
        publish(manager, "", text)
    (node,) = manager.match("", text, 40).path
    assert (node.start, node.hits) == (0, 2), "the first row found nothing"


def test_a_row_that_ran_the_text_of_another_publishes_what_it_adds_when_it_ends() -> None:
    """Both have computed the text themselves; the tree has the pages of the first."""
    manager, text = make_manager(), np.arange(24, dtype=np.int32)
    whole = np.concatenate([text, np.arange(100, 116, dtype=np.int32)])
    first, second = (manager.open_at(manager.match("", text, 23), "", 24) for _ in range(2))
    assert first is not None
    assert second is not None
    for lease in (first, second):
        assert manager.grow(lease, len(text))
        manager.slide(lease, len(text))
        manager.publish(lease, text, len(text))
    assert (first.cursor.detached, second.cursor.detached) == (False, True)
    assert manager.grow(second, len(whole))
    manager.slide(second, len(whole))
    manager.close(second, whole)
    manager.close(first, text)
    manager.drain_moves()
    manager.check(())
    found = manager.match("", whole, len(whole))
    assert (found.path[-1].end, found.resume.full_to) == (len(whole), len(whole))
