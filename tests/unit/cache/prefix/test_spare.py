"""A queue of page ids from which any can be taken (jswa/cache/prefix/spare.py)."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jswa.cache.prefix.spare import SpareQueue

IDS = st.lists(st.integers(0, 19), max_size=20, unique=True)
CALLS = st.lists(st.tuples(st.sampled_from(["put", "take", "pop"]), IDS), max_size=120)


@given(CALLS)
def test_a_queue_keeps_the_order_in_which_ids_were_put(calls: list[tuple[str, list[int]]]) -> None:
    """It is a dict whose keys are the ids: an id that is put twice keeps its place, and one may take absent ids."""
    queue, expected = SpareQueue(20), dict[int, None]()
    for call, ids in calls:
        array = np.array(ids, np.int32)
        if call == "put":
            queue.put(array)
            expected.update(dict.fromkeys(i for i in ids if i not in expected))
        elif call == "take":
            queue.take(array)
            for i in ids:
                expected.pop(i, None)
        else:
            count = max(1, len(ids))
            popped = queue.pop(count).tolist()
            assert popped == list(expected)[:count]
            for i in popped:
                del expected[i]
        assert len(queue) == len(expected)
        assert queue.ids().tolist() == list(expected)


def test_ids_that_come_and_go_cost_no_memory() -> None:
    """The log is written anew when it is full; the oldest ids stay the oldest."""
    queue = SpareQueue(100)
    queue.put(np.array([7]))
    for turn in range(1_000):
        ids = np.arange(10, 60) if turn % 2 else np.arange(60, 100)
        queue.put(ids)
        assert queue.pop(2).tolist() == [7 if turn < 1 else 8 - turn % 2, ids[0]]
        queue.take(ids)
        queue.put(np.array([7 + turn % 2]))
    assert queue.ids().tolist() == [8]
