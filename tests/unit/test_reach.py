"""What a query of a local layer sees, against the definition for each pair of query and key (jswa/architecture.py)."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.predict.counts import visible
from jswa.architecture import AttentionConfig, Reach
from jswa.exec.programs.attend import static
from jswa.rl.trainer import _visible

LENGTH = 60
REACHES = st.one_of(
    st.builds(Reach, st.integers(1, 25)),
    st.builds(Reach, st.integers(1, 25), st.just(True), st.integers(0, 4)),
)


def sees(reach: Reach, query: int, key: int) -> bool:
    """Return whether a query sees a key: the definition."""
    if reach.chunked:
        return key <= query and query // reach.size - key // reach.size <= reach.lookback
    return 0 <= query - key < reach.size


@given(REACHES)
def test_first_visible_and_hidden_from_are_the_ends_of_what_is_seen(reach: Reach) -> None:
    """Keys from `first_visible` on, by queries before `hidden_from`, and at most `span` of them."""
    seen = np.array([[sees(reach, query, key) for key in range(LENGTH)] for query in range(LENGTH)])
    most = 0
    for query in range(LENGTH):
        assert seen[query].nonzero()[0].tolist() == [*range(reach.first_visible(query), query + 1)]
        most = max(most, int(seen[query].sum()))
        assert reach.first_visible(query) == max(0, reach.oldest(query))
    assert most == min(reach.span, LENGTH)
    for key in range(LENGTH):
        assert seen[:, key].nonzero()[0].tolist() == [*range(key, min(reach.hidden_from(key), LENGTH))]


@given(REACHES, st.integers(1, 5))
def test_layers_upon_each_other_see_what_the_keys_that_they_see_see(reach: Reach, layers: int) -> None:
    """The position from which a replay makes the keys of the last layer exact."""
    for query in range(LENGTH):
        oldest = query
        for _ in range(layers):
            oldest = reach.first_visible(oldest)
        assert reach.first_visible(query, layers) == oldest


@given(REACHES)
def test_kernels_training_and_predictions_see_the_same_keys(reach: Reach) -> None:
    """Masks of the trainer, positions on the device and in NumPy, and the pairs that are counted."""
    seen = np.array([[sees(reach, query, key) for key in range(LENGTH)] for query in range(LENGTH)])
    attention = AttentionConfig(1, 1, 8, 8, 1.0, None, reach)
    positions, first = np.arange(LENGTH), [reach.first_visible(query) for query in range(LENGTH)]
    assert static(attention).first_visible(jnp.asarray(positions, jnp.int32)).tolist() == first
    assert static(attention).span == reach.span
    assert np.maximum(reach.oldest(positions), 0).tolist() == first
    assert np.array_equal(_visible(attention, LENGTH), seen)
    for start, count in ((0, LENGTH), (7, 30), (41, 1)):
        counted = visible(reach, np.array([start]), np.array([count]))
        assert counted.local_pairs == seen[start : start + count].sum()
        assert counted.local_keys == seen[start : start + count].any(axis=0).sum()


def test_a_window_looks_back_at_no_chunk() -> None:
    """It has no chunks."""
    with pytest.raises(AssertionError, match="only chunks look back"):
        Reach(8, lookback=1)
