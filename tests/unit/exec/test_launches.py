"""Launches that are sent to other hosts arrive unchanged (jswa/exec/launches.py)."""

import jax.numpy as jnp
import numpy as np
import pytest
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
    Pending,
    ProgramLaunch,
    decode,
    encode,
    move_launches,
    plan_launches,
)
from jswa.exec.pack import PackSpec
from jswa.exec.programs.sampling.rows import StepOutputs
from jswa.plan import AllWords, RowMask
from tests.support.builders import make_layout, make_plan, make_request
from tests.support.loops.loop import Loop
from tests.support.text.model import TextModel

ARRAYS = st.sampled_from([np.int32, np.float32]).flatmap(
    lambda kind: arrays(kind, st.one_of(st.just(()), array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5)))
)
LAUNCHES = st.lists(st.builds(ProgramLaunch, st.integers(0, 100), st.lists(ARRAYS, max_size=4).map(tuple)), min_size=1)


@given(LAUNCHES)
def test_decode_inverts_encode(launches: list[ProgramLaunch]) -> None:
    found = decode(encode(launches))
    assert [launch.program for launch in found] == [launch.program for launch in launches]
    for one, other in zip(found, launches, strict=True):
        for array, expected in zip(one.arrays, other.arrays, strict=True):
            assert array.dtype == expected.dtype
            assert array.shape == expected.shape
            assert np.asarray(array).tobytes() == np.asarray(expected).tobytes()


def test_arrays_that_are_not_contiguous_arrive_unchanged() -> None:
    table = np.arange(12, dtype=np.int32).reshape(3, 4).T
    (found,) = decode(encode([ProgramLaunch(5, (table, np.int32(7)))]))
    assert np.array_equal(found.arrays[0], table)
    assert found.arrays[1] == 7


def test_rows_that_start_on_cached_pages_share_a_launch() -> None:
    """Twenty admissions of a step: one launch, and one of the copies of the page inside which each of them goes on."""
    page, rows = 4, 20
    layout, limits = make_layout(page, Reach(9), num_full=1, num_local=2), Limits(60, rows, 64, page, num_slabs=2_000)
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
    launches = plan_launches(plan, {3: spec}, limits.num_slabs * layout.pages_per_slab, limits.pages_per_row, 64)
    copies = -(-len(plan.moves) // 32)
    assert copies > 0
    assert [launch.program for launch in launches] == [COPY_PAGES] * copies + [SET_ROWS, STEP + 3]


def test_tables_are_rewritten_only_if_pages_get_other_names() -> None:
    """Copies of cached pages rename nothing; compaction does."""
    copies = np.array([[1, 5, 0], [2, 6, 0]], np.int32)
    assert [launch.program for launch in move_launches(copies, 10)] == [COPY_PAGES]
    assert [launch.program for launch in move_launches(copies | [0, 0, 1], 10)] == [MOVE_PAGES]
    assert [launch.program for launch in move_launches(np.array([[1, 5, 0], [2, 6, 1]], np.int32), 10)] == [MOVE_PAGES]


def test_a_step_in_two_halves_has_its_drafts_before_its_tokens_and_of_its_own_rows_alone() -> None:
    """The arrays have rows of padding too."""
    plan, given = make_plan([3, 1], 0, [1, 1]), list[tuple[RowMask, ...]]()
    mask = RowMask(3, AllWords(np.zeros(2, np.int32)))

    def finish(masks: tuple[RowMask, ...]) -> StepOutputs:
        given.append(masks)
        return StepOutputs(jnp.arange(10, 14))

    step = Pending(plan, None, finish, jnp.arange(12).reshape(4, 3))
    assert step.drafts().tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(AssertionError, match="only half"):
        step.tokens()
    step.finish((mask,))
    assert given == [(mask,)]
    assert step.tokens().tolist() == [10, 11]
    assert step.results() is None
    with pytest.raises(AssertionError, match="as a whole"):
        step.finish(())
    assert Pending(plan, None, finish).drafts().shape == (2, 0), "a step without drafts has none of each row"
