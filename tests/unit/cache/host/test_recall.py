"""Pages of a text on their way back to the device (jswa/cache/host/recall.py)."""

from itertools import chain

import numpy as np
import pytest

from jswa.cache.host.recall import HostMatch, Recall
from jswa.cache.host.texts import Pages


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 50])
def test_pages_are_sent_once_in_order_a_few_slots_with_each_step(slots: int) -> None:
    """A local page is a slab of two slots here. What the device has is not sent."""
    source = Pages(np.array([3, 4, 5]), np.array([0, 7, 8]))
    kept = Pages(np.array([0, 9, 0]), np.zeros(3, np.int64))
    lacks = np.array([True, False, True])
    recall = Recall(HostMatch("", np.arange(12, dtype=np.int32), source, lacks, kept, 12, {}, branch=False), 0)
    recall.new.full[:], recall.new.local[:] = [11, 0, 12], [0, 2, 3]
    parts = []
    while not recall.complete:
        parts.append(recall.uploads(slots, 2))
        assert min(slots, 1) <= len(parts[-1]) <= slots + 1
    assert [*chain(*parts)] == [(3, 11), (5, 12), (14, 4), (15, 5), (16, 6), (17, 7)]
    assert recall.uploads(slots, 2) == []
