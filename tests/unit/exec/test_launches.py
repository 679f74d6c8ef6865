"""Launches that are sent to other hosts arrive unchanged (jswa/exec/launches.py)."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from jswa.architecture import Reach
from jswa.config import Limits
from jswa.exec.buckets import bucket_table, pick_bucket
from jswa.exec.launches import (
    COPY_PAGES,
    MOVE_PAGES,
    SET_ROWS,
    STEP,
    Launch,
    decode,
    encode,
    move_launches,
    plan_launches,
)
from jswa.exec.pack import PackSpec
from tests.support.builders import make_layout, make_request
from tests.support.loops.loop import Loop
from tests.support.text.model import TextModel

ARRAYS = st.sampled_from([np.int32, np.float32]).flatmap(
    lambda kind: arrays(kind, st.one_of(st.just(()), array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5)))
)
LAUNCHES = st.lists(st.builds(Launch, st.integers(0, 100), st.lists(ARRAYS, max_size=4).map(tuple)), min_size=1)


@given(LAUNCHES)
def test_decode_inverts_encode(launches: list[Launch]) -> None:
    found = decode(encode(launches))
    assert [launch.program for launch in found] == [launch.program for launch in launches]
    for one, other in zip(found, launches, strict=True):
        for array, expected in zip(one.arrays, other.arrays, strict=True):
            assert array.dtype == expected.dtype
            assert array.shape == expected.shape
            assert np.asarray(array).tobytes() == np.asarray(expected).tobytes()


def test_arrays_that_are_not_contiguous_arrive_unchanged() -> None:
    table = np.arange(12, dtype=np.int32).reshape(3, 4).T
    (found,) = decode(encode([Launch(5, (table, np.int32(7)))]))
    assert np.array_equal(found.arrays[0], table)
    assert found.arrays[1] == 7


def test_rows_that_start_on_cached_pages_share_a_launch() -> None:
    """Twenty admissions of a step: one launch, and one of the copies of the page inside which each of them goes on."""
    page, rows = 4, 20
    layout, limits = make_layout(page, Reach(9), num_full=1, num_local=2), Limits(60, rows, 64, page, num_blocks=2_000)
    loop = Loop(layout, limits, TextModel(64))
    text = [number % 7 for number in range(23)]
    loop.scheduler.add(make_request("first", text, length=25))
    while loop.scheduler.has_work():
        loop.step()
    for number in range(rows):
        loop.scheduler.add(make_request(f"r{number}", [*text, 30 + number], length=30))
    plan = loop.scheduler.plan()
    assert plan is not None
    assert len(plan.table_rows) == rows
    bucket = pick_bucket(bucket_table(limits, on_gpu=False), plan)
    spec = PackSpec.of(bucket, page_size=page, max_rows=rows)
    launches = plan_launches(plan, {3: spec}, limits.num_blocks * layout.pages_per_block, limits.pages_per_row, 64)
    copies = -(-len(plan.moves) // 32)
    assert copies > 0
    assert [launch.program for launch in launches] == [COPY_PAGES] * copies + [SET_ROWS, STEP + 3]


def test_tables_are_rewritten_only_if_pages_get_other_names() -> None:
    """Copies of cached pages rename nothing; compaction does."""
    copies = np.array([[1, 5, 0], [2, 6, 0]], np.int32)
    assert [launch.program for launch in move_launches(copies, 10)] == [COPY_PAGES]
    assert [launch.program for launch in move_launches(copies | [0, 0, 1], 10)] == [MOVE_PAGES]
    assert [launch.program for launch in move_launches(np.array([[1, 5, 0], [2, 6, 1]], np.int32), 10)] == [MOVE_PAGES]
