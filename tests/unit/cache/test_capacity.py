"""How much fits the arena (jswa/cache/capacity.py and the formulas of KVLayout), against counting."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jswa.cache.capacity import peak_slots, row_capacity, rows_held, too_little, useful_slabs
from jswa.cache.manager import CacheManager
from jswa.config import Limits
from tests.support.builders import make_layout, make_request, share
from tests.support.loops.loop import Loop
from tests.support.text.model import TextModel

KINDS = [(1, 0), (0, 1), (1, 1), (1, 2), (1, 6)]


@pytest.mark.parametrize("page_size", [1, 2, 5, 16])
def test_touch_is_the_most_pages_that_any_run_of_tokens_meets(page_size: int) -> None:
    """By brute force over the first position of the run."""
    layout = make_layout(page_size, 4, num_full=1, num_local=1)
    assert layout.touch(0) == 0
    for tokens in range(1, 4 * page_size + 2):
        met = [(start + tokens - 1) // page_size - start // page_size + 1 for start in range(page_size)]
        assert layout.touch(tokens) == max(met)


@share(4)
@given(
    kind=st.sampled_from(KINDS),
    page_size=st.sampled_from([1, 4, 16]),
    window=st.integers(1, 40),
    max_tokens=st.integers(1, 40),
    length=st.integers(1, 200),
    prompt=st.integers(1, 200),
)
def test_a_row_that_runs_alone_never_holds_more_than_its_peak(
    kind: tuple[int, int], page_size: int, window: int, max_tokens: int, length: int, prompt: int
) -> None:
    """A simulated row stays within peak_slots in prefill and decode, and within resident_slots between steps."""
    layout = make_layout(page_size, window, num_full=kind[0], num_local=kind[1])
    manager = CacheManager(layout, 1 + 2 * 200, 200, 1)
    lease, launched, prompt = manager.open(), 0, min(prompt, length)
    while launched < length:
        after = min(launched + max_tokens, prompt) if launched < prompt else launched + 1
        assert manager.grow(lease, after)
        assert lease.held_slots <= peak_slots(layout, max_tokens, length)
        manager.slide(lease, launched := after)
        assert lease.held_slots <= layout.resident_slots(launched)
    assert len(lease.full.held) == layout.full_pages(length)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_tokens", [1, 3, 8, 50])
def test_some_row_reaches_the_peak(kind: tuple[int, int], max_tokens: int) -> None:
    """peak_slots has no slack: a prompt that is run in full chunks comes within one local page of it."""
    layout = make_layout(4, 6, num_full=kind[0], num_local=kind[1])
    manager = CacheManager(layout, 200, 200, 1)
    lease, length, peak = manager.open(), 10 * max_tokens, 0
    for launched in range(max_tokens, length + 1, max_tokens):
        manager.grow(lease, launched)
        peak = max(peak, lease.held_slots)
        manager.slide(lease, launched)
    slack = layout.pages_per_slab if layout.local else 0
    assert peak_slots(layout, max_tokens, length) - slack <= peak <= peak_slots(layout, max_tokens, length)


@share(2)
@given(
    kind=st.sampled_from(KINDS),
    page_size=st.sampled_from([1, 4, 16]),
    window=st.integers(1, 40),
    max_tokens=st.integers(1, 40),
    max_model_len=st.integers(2, 120),
    slots=st.integers(0, 200),
)
def test_capacity_is_the_longest_row_whose_peak_fits(
    kind: tuple[int, int], page_size: int, window: int, max_tokens: int, max_model_len: int, slots: int
) -> None:
    """By trying every length. The peak grows with the length, so bisection is right."""
    layout = make_layout(page_size, window, num_full=kind[0], num_local=kind[1])
    limits = Limits(max_model_len, 1, max_tokens, page_size)
    fits = [n for n in range(1, max_model_len + 1) if peak_slots(layout, max_tokens, n) <= slots]
    assert row_capacity(layout, limits, slots) == max(fits, default=0) == len(fits)


@share(4)
@given(
    kind=st.sampled_from(KINDS),
    page_size=st.sampled_from([1, 4, 16]),
    max_tokens=st.integers(1, 40),
    length=st.integers(2, 120),
    asked=st.booleans(),
)
def test_the_error_for_too_little_memory_names_the_least_that_is_enough(
    kind: tuple[int, int], page_size: int, max_tokens: int, length: int, asked: bool
) -> None:
    """With the bytes that it names a request of that length is always served, and with one slab less it is not."""
    layout, limits = (
        make_layout(page_size, 7, num_full=kind[0], num_local=kind[1]),
        Limits(120, 1, max_tokens, page_size),
    )
    slab = layout.slab_bytes(2)
    error = too_little(layout, limits, length if asked else None, memory=slab, itemsize=2, capacity=0)
    assert error.field == ("max_model_len" if asked else "kv_cache_memory_bytes")
    named = {int(n): int(size) for size, n in re.findall(r"(\d+) bytes one of (\d+)", error.limit.replace(",", ""))}
    assert named.keys() == {length if asked else 2, 120}
    for tokens, size in named.items():
        slots = (size // slab - 1) * layout.pages_per_slab
        assert size % slab == 0
        assert (
            row_capacity(layout, limits, slots) >= tokens > row_capacity(layout, limits, slots - layout.pages_per_slab)
        )
    assert "bfloat16" not in error.limit
    assert (
        "--dtype bfloat16, which takes half"
        in too_little(layout, limits, None, memory=slab, itemsize=4, capacity=0).limit
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [1, 4])
def test_an_arena_of_useful_slabs_never_runs_short(kind: tuple[int, int], page_size: int) -> None:
    """With all rows at max_model_len at the same time no row waits for pages, and none is preempted."""
    layout = make_layout(page_size, 7, num_full=kind[0], num_local=kind[1])
    limits = Limits(40, 5, 12, page_size)
    limits = Limits(40, 5, 12, page_size, num_slabs=useful_slabs(layout, limits))
    loop = Loop(layout, limits, TextModel(50))
    assert loop.scheduler.capacity == limits.max_model_len
    for i in range(limits.max_rows):
        loop.scheduler.add(make_request(str(i), [i] * (5 * i + 1), length=40))
    loop.step()
    while loop.scheduler.stats().waiting:
        loop.step()
        assert loop.runner.launches < 20
    while loop.scheduler.has_work():
        loop.step()
    assert loop.scheduler.preemptions == 0


def test_capacity_of_a_small_arena_by_hand() -> None:
    """p = 4, W = 6, m = 2, chunks of 8."""
    layout = make_layout(4, 6, num_full=1, num_local=2)
    assert layout.pages_per_slab == 2
    # touch(6) = ⌈5/4⌉ + 1 = 3 slabs of 2 slots; 20 tokens are 5 full pages.
    assert layout.resident_slots(20) == 5 + 2 * 3
    assert layout.resident_slots(3) == 1 + 2 * 2
    # The last chunk of 8 beside the 5 keys before it: touch(13) = 4 slabs.
    assert peak_slots(layout, 8, 20) == 5 + 2 * 4
    assert layout.step_reserve_slots(8, 3) == 2 * (2 + 3)
    assert rows_held(layout, 34, 20) == 3
    assert make_layout(4, None, num_full=1, num_local=0).step_reserve_slots(8, 3) == 0
    # 4 rows of resident(20), the reserve ⌈8/4⌉ + 4 slabs, and the slab of zeros.
    assert useful_slabs(layout, Limits(20, 4, 8, 4)) == 1 + math.ceil((4 * 11 + 2 * 6) / 2)
