"""Predictions count the pairs of query and key that a layer computes."""

import numpy as np
from hypothesis import given

from benchmarks.predict.counts import visible
from jswa.architecture import Reach
from tests.support.kernels.reach import REACHES, sees

LENGTH = 60


@given(REACHES)
def test_pairs_are_those_that_queries_see(reach: Reach) -> None:
    seen = np.array([[sees(reach, query, key) for key in range(LENGTH)] for query in range(LENGTH)])
    for start, count in ((0, LENGTH), (7, 30), (41, 1)):
        counted = visible(reach, np.array([start]), np.array([count]))
        assert counted.local_pairs == seen[start : start + count].sum()
        assert counted.local_keys == seen[start : start + count].any(axis=0).sum()
