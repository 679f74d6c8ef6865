"""The counters of running rows as arrays (jswa/sched/rows.py), and a sequence's tokens in them and beside them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jswa.cache.capacity import ResidentSlots
from jswa.cache.lease import Lease, LeaseTable
from jswa.cache.manager import CacheManager
from jswa.config import Limits
from jswa.sched.rows import Claims, Rows
from jswa.sched.sequence import Sequence, Status
from tests.support.builders import make_layout, make_request

LIMITS = Limits(400, 4, 16, 4, num_slabs=41)


def begin(rows: Rows, sequence: Sequence, *, table: LeaseTable | None = None) -> None:
    """Make a sequence a row, the first that is free."""
    table = table or LeaseTable(make_layout(4, None, num_full=1, num_local=0), rows.max_rows, 8)
    lease = Lease(table, int((rows.limit == 0).argmax()))
    rows.admit(sequence.request, sequence.record, lease, launched=0, tokens=sequence.tokens)
    sequence.rows, sequence.row_id, sequence.lease, sequence.status = rows, lease.row, lease, Status.RUNNING


def make_sequence(name: str, prompt: list[int], stop_ids: tuple[int, ...] = ()) -> Sequence:
    """Return a sequence that waits."""
    return Sequence(make_request(name, prompt, length=9999, stop_ids=list(stop_ids)), (0, 0), limit=9999)


@given(st.integers(1, 300), st.lists(st.tuples(st.sampled_from(["one", "all", "many", "leave"]), st.integers(1, 300))))
def test_a_sequence_has_all_its_tokens_however_they_come(length: int, changes: list[tuple[str, int]]) -> None:
    """One by one, in an array with other rows, many at once, and after it has left its row."""
    rows = Rows(max_rows=3)
    sequence, expected = make_sequence("a", list(range(length))), list(range(length))
    begin(rows, make_sequence("other", [1]))
    begin(rows, sequence)
    for kind, count in changes:
        new = [len(expected) + i for i in range(count)]
        expected += new
        if kind == "many":
            sequence.extend(np.array(new, np.int32))
            continue
        if kind == "leave" and sequence.rows is not None:
            sequence.leave()
        elif sequence.rows is None:
            begin(rows, sequence)
        for token in new:
            if kind == "all" and sequence.rows is not None:
                (marked,) = rows.append(np.array([sequence.row_id]), np.array([token], np.int32))
                if marked:
                    sequence.copy_recent()
            else:
                sequence.append(token)
    assert sequence.num_known == len(expected)
    if sequence.rows is not None:
        assert rows.last_tokens(np.array([sequence.row_id])).tolist() == expected[-1:]
    assert sequence.tokens.tolist() == expected
    assert sequence.request.prompt.tolist() == list(range(length)), "the prompt belongs to the request"


def test_a_step_in_flight_knows_the_rows_that_have_changed_hands() -> None:
    """A row that two sequences have had counts for the second only in steps that were planned for it."""
    rows = Rows(max_rows=2)
    first, other, second = (make_sequence(name, [1, 2]) for name in ("first", "other", "second"))
    begin(rows, first)
    begin(rows, other)
    rows.plain[:] = True
    both = np.array([first.row_id, other.row_id])
    rows.launch(both, np.array([2, 2]))
    assert (first.in_flight, other.in_flight) == (1, 1)
    first.leave()
    assert (first.in_flight, first.returning) == (1, 1)
    begin(rows, second)
    assert second.in_flight == 0
    rows.plain[:] = True
    rows.launch(both, np.array([2, 3]))
    assert (second.in_flight, other.in_flight) == (1, 2)
    assert [rows.land()[1].tolist(), rows.land()[1].tolist()] == [[False, True], [True, True]]


@pytest.mark.parametrize("several", [(), tuple(range(100, 120))])
def test_stop_ids_are_those_of_the_rows_that_run(several: tuple[int, ...]) -> None:
    """A token is named as long as a row has it among its stop ids, in both ways of comparing."""
    rows = Rows(max_rows=3)
    one, two, many = make_sequence("1", [1], (5, 7)), make_sequence("2", [1], (7,)), make_sequence("3", [1], several)
    for sequence in (one, two, many):
        begin(rows, sequence)
    tokens = np.array([5, 6, 7], np.int32)
    assert rows.stops.among(tokens).tolist() == [True, False, True]
    one.leave()
    assert rows.stops.among(tokens).tolist() == [False, False, True]
    two.leave()
    many.leave()
    assert rows.stops.among(tokens).tolist() == [False, False, False]
    rows.check(np.zeros(0, np.int64))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.sampled_from([None, 1, 5, 6, 64]))
def test_resident_slots_of_many_rows_are_those_of_each(lengths: list[int], window: int | None) -> None:
    """The formula in arrays and the one of a single row agree."""
    layout = make_layout(4, window, num_full=1, num_local=2 if window else 0)
    expected = [layout.resident_slots(length) for length in lengths]
    assert ResidentSlots(layout)(np.array(lengths)).tolist() == expected


def test_claims_follow_rows_that_begin_and_pages_that_rows_get() -> None:
    """What a row may hold, less what it holds; summed up again after `changed`."""
    rows, layout = Rows(max_rows=4), make_layout(4, None, num_full=1, num_local=0)
    first, second = make_sequence("1", [1] * 7), make_sequence("2", [1] * 15)
    cache = CacheManager(layout, 10, 8, 4)
    table = cache.table
    begin(rows, first, table=table)
    table.covered[first.row_id] = 4
    claims = Claims(rows, cache)
    assert claims.claimed() == 2 - 1
    begin(rows, second, table=table)
    assert second.lease is not None
    claims.admit(second.lease, layout.resident_slots(second.num_known + 1))
    assert claims.claimed() == (2 - 1) + 4
    table.covered[first.row_id] = 8
    claims.changed()
    assert claims.claimed() == 4
    assert claims.claimed([second.row_id]) == 0
