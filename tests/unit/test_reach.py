"""What a query of a local layer sees, against the definition for each pair of query and key (jswa/architecture/)."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jswa.architecture import AttentionConfig, Reach
from jswa.exec.programs.attend import static
from jswa.rl.trainer import visible_keys
from tests.support.kernels.reach import REACHES, sees

LENGTH = 60


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
def test_kernels_and_training_see_the_same_keys(reach: Reach) -> None:
    """Masks of the trainer, and positions on the device and in NumPy."""
    seen = np.array([[sees(reach, query, key) for key in range(LENGTH)] for query in range(LENGTH)])
    attention = AttentionConfig(1, 1, 8, 8, 1.0, None, reach)
    positions, first = np.arange(LENGTH), [reach.first_visible(query) for query in range(LENGTH)]
    assert static(attention).first_visible(jnp.asarray(positions, jnp.int32)).tolist() == first
    assert static(attention).span == reach.span
    assert np.maximum(reach.oldest(positions), 0).tolist() == first
    assert np.array_equal(visible_keys(attention, LENGTH), seen)


def test_a_window_looks_back_at_no_chunk() -> None:
    """It has no chunks."""
    with pytest.raises(AssertionError, match="only chunks look back"):
        Reach(8, lookback=1)
