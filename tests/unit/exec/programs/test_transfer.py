"""Copies of pages to the host and back, against NumPy (jswa/exec/programs/transfer.py)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.exec.programs.state import DeviceState, init_state
from jswa.exec.programs.transfer import (
    MOST_BYTES,
    clear_stale,
    compile_read_slots,
    compile_write_slots,
    copy_width,
    slot_batch,
    slot_shapes,
)
from tests.support.oracles import small_model

NUM_SLABS = 40
PATTERNS = ["LLFLLF", "F", "LLLLLF", "LL"]  # two full pages a slab in two lanes; one; five; no full layers


def make_state(pattern: str, dtype: str = "float32") -> tuple[KVLayout, DeviceState]:
    """Return a state with random lanes."""
    layout, rng = KVLayout.of(small_model(pattern), 2), np.random.default_rng(0)
    limits = Limits(24, 4, 8, page_size=2, num_slabs=NUM_SLABS)
    state = init_state(layout, limits, 61, jnp.dtype(dtype))
    lanes = [jnp.asarray(rng.standard_normal(lane.shape), lane.dtype) for lane in state["lanes"]]
    return layout, {**state, "lanes": lanes}


def slots_of(layout: KVLayout, state: DeviceState) -> list[np.ndarray]:
    """Return copies of all slots of each lane."""
    return [np.array(lane).reshape(NUM_SLABS * layout.pages_per_slab, -1) for lane in state["lanes"]]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("count", [1, 7, 32])
def test_slots_are_read_in_order(pattern: str, count: int) -> None:
    """In one batch, whose padding is ignored; also in bfloat16."""
    layout, state = make_state(pattern, "bfloat16" if count % 2 else "float32")
    program, num_slots = compile_read_slots(layout, state), NUM_SLABS * layout.pages_per_slab
    width = copy_width(layout, state["lanes"][0].dtype.itemsize)
    ids = np.random.default_rng(1).integers(0, num_slots, count)
    lanes = program(state, slot_batch(ids, num_slots, width))
    for lane, expected in zip(lanes, slots_of(layout, state), strict=True):
        assert (len(lane), lane.dtype) == (width, expected.dtype)
        np.testing.assert_array_equal(np.asarray(lane)[:count], expected[ids])


@pytest.mark.parametrize(("slot_elems", "width"), [(1, 32), (2**17, 32), (2**18, 16), (2**20 - 1, 4), (2**24, 1)])
def test_a_batch_of_slots_is_at_most_16_mib(slot_elems: int, width: int) -> None:
    """Unless one slot is more; here in two lanes of 16-bit numbers."""
    layout = KVLayout.of(small_model("LLFLLF"), 2)
    m = layout.pages_per_slab
    layout = dataclasses.replace(layout, num_lanes=2, slab_elems=m * slot_elems)
    assert copy_width(layout, 2) == width
    assert width == 1 or width * layout.slab_bytes(2) <= m * MOST_BYTES


@pytest.mark.optimized
@pytest.mark.parametrize("pattern", PATTERNS)
def test_only_the_written_slots_change(pattern: str) -> None:
    """Padding is dropped; the arena is updated in place."""
    layout, state = make_state(pattern)
    program, num_slots = compile_write_slots(layout, state), NUM_SLABS * layout.pages_per_slab
    rng = np.random.default_rng(2)
    ids = rng.permutation(num_slots)[:20]
    contents = [rng.standard_normal(shape.shape).astype(np.float32) for shape in slot_shapes(layout, state)]
    expected = slots_of(layout, state)
    for lane, new in zip(expected, contents, strict=True):
        lane[ids] = new[:20]
    table = np.array(state["full_table"])
    after = program(state, slot_batch(ids, num_slots, len(contents[0])), contents)
    assert all(lane.is_deleted() for lane in state["lanes"]), "the state was copied"
    for got, wanted in zip(slots_of(layout, after), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    np.testing.assert_array_equal(after["full_table"], table)
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < jax.tree.leaves(after["lanes"])[0].nbytes, "a lane is copied"


@pytest.mark.parametrize("pattern", PATTERNS)
def test_memory_that_no_layer_reads_is_zeroed(pattern: str) -> None:
    """Tokens after the end of a text, and slots of a local page that no layer uses; all else is unchanged."""
    layout, state = make_state(pattern)
    m, p = layout.pages_per_slab, layout.page_size
    full = np.array([2, 1, 2] if layout.full else [], np.int64)
    local = np.array([1, 2] if layout.local else [], np.int64)
    before = [lane[: len(full) + m * len(local)] + 1.0 for lane in slots_of(layout, state)]
    contents = [lane.copy() for lane in before]
    clear_stale(contents, layout, full, local)
    for number, (lane, old) in enumerate(zip(contents, before, strict=True)):
        if layout.full is not None:
            pages, were = (a[:3].reshape(3, layout.full.num_kv_heads, p, -1) for a in (lane, old))
            np.testing.assert_array_equal(pages[[0, 2]], were[[0, 2]])
            np.testing.assert_array_equal(pages[1, :, 0], were[1, :, 0])
            assert not pages[1, :, 1].any()
        if layout.local is not None:
            shape = (2, layout.local.layers_per_page, layout.local.num_kv_heads, p, -1)
            new, was = (a[len(full) :].reshape(shape) for a in (lane, old))
            slots = [layer.index for layer in layout.layers if layer.kind == "local" and layer.lane == number]
            np.testing.assert_array_equal(new[1, slots], was[1, slots])
            np.testing.assert_array_equal(new[0, slots, :, 0], was[0, slots, :, 0])
            assert not new[0, :, :, 1].any()
            assert not np.delete(new, slots, axis=1).any()


def test_each_device_clears_its_part_of_a_page() -> None:
    """Of two devices that share the tokens of pages of eight: one has positions 0, 2, 4, 6, the other 1, 3, 5, 7."""
    model = dataclasses.replace(small_model("F"), devices=2, context_devices=2)
    layout = KVLayout.of(model, 8)
    assert layout.full is not None
    counts = np.array([8, 1, 4, 5], np.int64)
    contents = [np.ones((4, layout.slab_elems // layout.pages_per_slab), np.float32) for _ in range(2)]
    clear_stale(contents, layout, counts, np.zeros(0, np.int64))
    for lane, kept in zip(contents, ([4, 1, 2, 3], [4, 0, 2, 2]), strict=True):
        pages = lane.reshape(4, layout.full.num_kv_heads, 4, -1)
        for page, count in zip(pages, kept, strict=True):
            assert page[:, :count].all()
            assert not page[:, count:].any()
