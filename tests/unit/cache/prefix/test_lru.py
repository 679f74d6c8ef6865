"""The policy that evicts what was used least recently (jswa/cache/prefix/lru.py), through the cache manager."""

import numpy as np
import pytest
from jaxtyping import Int

from jswa.cache.layout import KVLayout
from jswa.cache.manager import CacheManager
from jswa.cache.prefix.edges import Node, Window
from jswa.cache.prefix.lru import LRU
from jswa.config import HostMemory, Limits
from jswa.errors import EngineError
from jswa.sched.scheduler import Scheduler
from tests.support.builders import make_layout

LAYOUT = make_layout(4, 6, num_full=1, num_local=2)
LENGTH = 20  # tokens of a text: five pages, and a window


def run(manager: CacheManager, text: Int[np.ndarray, " T"]) -> int:
    """Run a row over a text to its end; return where it started."""
    match = manager.match("", text, len(text) - 1)
    lease = manager.open_at(match, length=len(text))
    assert lease is not None
    assert manager.grow(lease, len(text))
    manager.slide(lease, len(text))
    manager.publish(lease, text, len(text))
    manager.close(lease, text, prompt=len(text))
    manager.drain_moves()
    manager.prefix.check()
    return match.resume.start


def text_of(number: int) -> Int[np.ndarray, " T"]:
    """Return a text that shares no token with those of other numbers."""
    return np.arange(LENGTH, dtype=np.int32) + 100 * number


def evict_all(manager: CacheManager) -> list[tuple[int, type[Node | Window]]]:
    """Evict everything; return number and kind of each victim, several parts of a text once."""
    victims: list[tuple[int, type[Node | Window]]] = []

    def note(item: Node | Window) -> None:
        if (victim := (int(item.edge.tokens[0]) // 100, type(item))) not in victims[-1:]:
            victims.append(victim)

    retention = manager.prefix.retention
    retention.drop_spare()
    retention.demote = note
    while manager.pool.evictable_slots:
        retention.make_room(manager.pool.free_slots + 1)
        manager.prefix.check()
    return victims


def make_manager(layout: KVLayout = LAYOUT) -> CacheManager:
    """Return a cache with memory for all texts of a test."""
    return CacheManager(layout, 200, 20, 4, policy=LRU)


def test_what_was_used_least_recently_goes_first() -> None:
    """A text that is used again goes last, and loses its windows before its end."""
    manager = make_manager()
    for number in (1, 2, 3, 4, 2):
        run(manager, text_of(number))
    victims = evict_all(manager)
    assert list(dict.fromkeys(number for number, _ in victims)) == [1, 3, 4, 2]
    assert [kind for number, kind in victims if number == 2][-2:] == [Window, Node]
    assert manager.pool.free_slots == manager.pool.total_slots


def test_a_part_that_several_texts_share_goes_after_them() -> None:
    """An edge is no older than what continues it."""
    manager = make_manager(make_layout(4, None, num_full=1, num_local=0))
    shared = text_of(1)
    run(manager, np.concatenate([shared, text_of(2)]))
    run(manager, text_of(5))
    run(manager, np.concatenate([shared, text_of(3)]))
    run(manager, np.concatenate([shared, text_of(3)]))
    for node in manager.prefix.tree.nodes():
        assert all(child.last <= node.last for child in node.children.values())
    assert evict_all(manager) == [(2, Node), (5, Node), (3, Node), (1, Node)]


def test_a_use_between_two_evictions_counts() -> None:
    """Victims are looked up many at a time."""
    manager = make_manager(make_layout(4, None, num_full=1, num_local=0))
    for number in (1, 2, 3):
        run(manager, text_of(number))
    manager.prefix.retention.make_room(manager.pool.free_slots + LENGTH // 4)
    run(manager, text_of(2))
    assert evict_all(manager) == [(3, Node), (2, Node)]


def test_what_a_row_holds_is_passed_over_and_nothing_left_is_an_error() -> None:
    manager = make_manager()
    run(manager, text_of(1))
    run(manager, text_of(2))
    lease = manager.open_at(manager.match("", text_of(1), LENGTH), length=LENGTH + 1)
    assert lease is not None
    run(manager, text_of(3))
    assert [number for number, _ in evict_all(manager)][:2] == [2, 2]
    with pytest.raises(EngineError, match="nothing to evict"):
        manager.prefix.policy.victim()
    manager.close(lease)
    assert manager.pool.evictable_slots
    assert {number for number, _ in evict_all(manager)} == {1}


def test_an_evicted_text_that_is_asked_for_is_told_from_a_new_one() -> None:
    """Whatever the policy is."""
    manager = make_manager(make_layout(16, 6, num_full=1, num_local=2))
    run(manager, text_of(1))
    evict_all(manager)
    assert manager.match("", text_of(1), LENGTH).reason == "evicted"
    assert manager.match("", text_of(2), LENGTH).reason == "cold"


def test_the_option_is_for_both_caches() -> None:
    """That of the device, and that of the host."""
    memory = HostMemory(50, slots_per_step=8, tokens_per_slot=0.1)
    limits = Limits(64, 2, 16, 4, num_slabs=50, host=memory, radix_eviction_policy="lru")
    cache = Scheduler(LAYOUT, limits).cache
    assert cache.host is not None
    assert isinstance(cache.prefix.policy, LRU)
    assert isinstance(cache.host.tier.prefix.policy, LRU)
