"""The indices of steps with drafts: rows with places of their own, rows that share tokens, and rows beside prompts."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Int

from jswa.cache.layout import KVLayout
from jswa.exec.buckets import Bucket
from jswa.exec.pack import Inputs, PackSpec, pack, unpack
from jswa.exec.programs.indices import (
    Spans,
    StepIndices,
    packed_first,
    row_ids_of,
    row_spans,
    running,
    step_indices,
)
from jswa.exec.programs.logits_state import init_logits_state
from jswa.exec.programs.state import DeviceState
from jswa.plan import FROM_DEVICE, StepPlan
from tests.support.builders import changed, make_plan
from tests.support.oracles import small_model

MAX_ROWS, PAGE = 6, 4
LAYOUT = KVLayout.of(small_model("LF", window=9), PAGE)
OWN, SHARED, MIXED = (
    Bucket(16, 4, decode=True, drafts=3), Bucket.verifying(4, 1, 3), Bucket(40, 4, decode=False, drafts=3),
)  # fmt: skip
BUCKETS = pytest.mark.parametrize("bucket", [OWN, SHARED, MIXED], ids=["own places", "shared", "mixed"])
SLOTS, STARTS, COUNTS = [4, 1, 2], [10, 3, 33], [4, 1, 2]  # three rows, with 3, 0 and 1 drafts, and one of padding
TOKENS = np.arange(100, 107, dtype=np.int32)


def plan_of(**others: Any) -> StepPlan:
    """Return the plan of the three rows."""
    return make_plan(SLOTS, STARTS, COUNTS, **{"samples": COUNTS, "tokens": TOKENS, "drafts": 3, **others})


def inputs_of(plan: StepPlan, bucket: Bucket) -> Inputs:
    return unpack(jnp.asarray(pack(plan, spec_of(bucket))), spec_of(bucket))


def spec_of(bucket: Bucket) -> PackSpec:
    return PackSpec.of(bucket, page_size=PAGE, max_rows=MAX_ROWS)


def indices_of(inputs: Inputs, bucket: Bucket) -> StepIndices:
    """Return the indices of a step as NumPy arrays."""
    found = jax.jit(partial(step_indices, layout=LAYOUT, bucket=bucket))(inputs, state_of())
    as_numpy: StepIndices = jax.tree.map(np.asarray, found)
    return as_numpy


def state_of(length: Int[np.ndarray, " R"] | None = None) -> DeviceState:
    """Return a device state with page tables in which all entries differ."""
    tables = np.arange(1, 1 + 2 * MAX_ROWS * 12, dtype=np.int32).reshape(2, MAX_ROWS, 12)
    return DeviceState(
        lanes=[jnp.zeros((1, 200, LAYOUT.slab_elems))],
        full_table=jnp.asarray(tables[0]),
        local_table=jnp.asarray(tables[1]),
        length=jnp.asarray(np.zeros(MAX_ROWS, np.int32) if length is None else length),
        last_token=jnp.zeros(MAX_ROWS, jnp.int32),
        for_logits=init_logits_state(2, 61),
        texts=None,
        carry=None,
        draft_lanes=[],
    )


@BUCKETS
def test_every_token_of_a_row_with_drafts_has_its_position_its_row_and_its_cell(bucket: Bucket) -> None:
    found = indices_of(inputs_of(plan_of(), bucket), bucket)
    full_table, local_table = (np.asarray(table) for table in (state_of()["full_table"], state_of()["local_table"]))
    first = [0, 4, 8] if bucket is OWN else [0, 4, 5]
    assert found.first_token[:3].tolist() == first
    assert found.starts[:3].tolist() == STARTS
    assert (found.counts.tolist(), found.drafts.tolist()) == ([*COUNTS, 0], [3, 0, 1, 0])
    assert int(found.real.sum()) == sum(COUNTS)
    assert found.full is not None
    assert found.local is not None
    for row, (slot, start, count) in enumerate(zip(SLOTS, STARTS, COUNTS, strict=True)):
        places = np.arange(first[row], first[row] + count)
        positions = start + np.arange(count)
        assert bool(found.real[places].all())
        assert found.positions[places].tolist() == positions.tolist()
        assert found.token_rows[places].tolist() == [row] * count
        assert found.token_row_ids[places].tolist() == [slot] * count
        assert int(found.last_tokens[row]) == places[-1]
        for kind, table in ((found.full, full_table), (found.local, local_table)):
            assert kind.write_pages[places].tolist() == table[slot, positions // PAGE].tolist()
            assert kind.write_offsets[places].tolist() == (positions % PAGE).tolist()
    for kind in (found.full, found.local):
        assert kind.rows.counts.tolist() == [*COUNTS, 0]
        assert kind.last.starts[:3].tolist() == [start + count - 1 for start, count in zip(STARTS, COUNTS, strict=True)]
        assert kind.last.counts.tolist() == [1, 1, 1, 0], "of each row its last token, of padding none"
        assert kind.last.first_page.tolist() == kind.rows.first_page.tolist()


@BUCKETS
def test_rows_with_drafts_are_those_that_have_some(bucket: Bucket) -> None:
    inputs, expected = inputs_of(plan_of(), bucket), [4, MAX_ROWS, 2, MAX_ROWS]
    assert row_spans(inputs, state_of()).drafting(MAX_ROWS).tolist() == expected
    indices = jax.tree.map(jnp.asarray, indices_of(inputs, bucket))
    assert row_ids_of(indices, MAX_ROWS).tolist() == expected


@BUCKETS
def test_the_first_token_of_each_row_is_found_where_it_is_packed(bucket: Bucket) -> None:
    inputs = inputs_of(plan_of(), bucket)
    assert inputs.tokens[packed_first(inputs, bucket)[:3]].tolist() == [100, 104, 105]


def test_places_of_drafts_wait_for_the_device_and_those_of_padding_are_zero() -> None:
    row = [FROM_DEVICE] * 3
    assert inputs_of(plan_of(), OWN).tokens.tolist() == [100, *row, 104, *row, 105, *row, 0, 0, 0, 0]


def test_prompts_have_no_drafts_and_drafts_end_with_the_row() -> None:
    """A row that yields no token has none; one that the device knows to be near its limit has fewer than planned."""
    inside = row_spans(inputs_of(plan_of(samples=[0, 1, 1]), MIXED), state_of())
    assert (inside.counts.tolist(), inside.drafts.tolist()) == ([4, 1, 2, 0], [0, 0, 0, 0])
    length = np.full(MAX_ROWS, 20, np.int32)
    near = changed(plan_of(), start=FROM_DEVICE, limit=[23, 30, 20])
    found = row_spans(inputs_of(near, OWN), state_of(length))
    assert found.starts[:3].tolist() == [20] * 3
    assert found.counts[:3].tolist() == [2, 1, 0], "positions from limit - 1 on are padding"
    assert found.drafts[:3].tolist() == [1, 0, 0]


@pytest.mark.parametrize("kept", [[3, 0, 1, 0], [1, 0, 0, 0], [0, 0, 1, 0]])
def test_a_row_that_runs_fewer_drafts_runs_and_yields_so_many_tokens_fewer(kept: list[int]) -> None:
    inputs = inputs_of(plan_of(), OWN)
    spans: Spans = row_spans(inputs, state_of())
    found = running(inputs, spans, jnp.array(kept))
    assert found.column("count").tolist()[:3] == [1 + drafts for drafts in kept[:3]]
    assert found.column("samples").tolist()[:3] == [1 + drafts for drafts in kept[:3]]
    assert int(found.column("count")[3]) == 0
    for name in ("row_id", "start", "limit", "temperature", "logits_state"):
        assert found.column(name).tolist() == inputs.column(name).tolist()


def test_a_prompt_beside_drafts_yields_what_it_did() -> None:
    """Of a row near its limit only what is left counts."""
    inputs = inputs_of(changed(plan_of(samples=[4, 1, 0]), start=FROM_DEVICE, limit=[22, 60, 60]), MIXED)
    spans = row_spans(inputs, state_of(np.full(MAX_ROWS, 20, np.int32)))
    found = running(inputs, spans, jnp.zeros(4, jnp.int32))
    assert found.column("count").tolist() == [1, 1, 2, 0]
    assert found.column("samples").tolist()[:3] == [1, 1, 0]
