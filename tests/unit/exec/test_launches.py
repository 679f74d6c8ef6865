"""Launches that are sent to other hosts arrive unchanged (jswa/exec/launches.py)."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from jswa.exec.launches import Launch, decode, encode

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
