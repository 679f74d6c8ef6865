"""What the stored sketch of a fixture's logits detects (tests/parity/sketch.py): everything that the logits would."""

import numpy as np
import pytest

from tests.parity.load import load_fixture
from tests.parity.sketch import COLUMNS, next_log_probs, sketch, weights

VOCABULARIES = [96, 101, 131]
TOLERANCE = 1.5e-4  # of test_dense_parity


def logits(vocab: int) -> np.ndarray:
    """Random logits [64, V] of the size that fixtures have."""
    return np.random.default_rng(vocab).standard_normal((64, vocab)).astype(np.float32)


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_each_logit_counts_in_one_column_with_a_weight_of_its_own(vocab: int) -> None:
    """Weights are 1 to 1.5, so no error of one logit shrinks; all differ, so no two swapped logits cancel."""
    matrix = weights(vocab)
    assert matrix.shape == (vocab, COLUMNS)
    for column in matrix.T:
        found = column[column != 0]
        assert len(found) >= vocab // COLUMNS
        assert len(set(np.abs(found).round(9))) == len(found)
        assert (np.abs(found) >= 1).all()
        assert (np.abs(found) <= 1.5).all()
    assert ((matrix != 0).sum(axis=1) == 1).all()
    assert np.abs(matrix.sum(axis=0)).max() > 4, "a constant added to all logits shrinks"


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_one_logit_beyond_the_tolerance_is_detected(vocab: int) -> None:
    """At every position and for every token, up and down."""
    exact = logits(vocab)
    before = sketch(exact)
    for token in range(vocab):
        for error in (-1.1 * TOLERANCE, 1.1 * TOLERANCE):
            wrong = exact.copy()
            wrong[:, token] += np.float32(error)
            assert (np.abs(sketch(wrong) - before).max(axis=1) > TOLERANCE).all(), token


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_a_swap_of_two_logits_is_detected(vocab: int) -> None:
    """For every pair of tokens whose logits differ by a hundredth or more."""
    row = logits(vocab)[0].astype(np.float64)
    differences = row[:, None] - row
    rows = weights(vocab)
    change = np.abs(differences[..., None] * (rows[:, None] - rows)).max(axis=-1)  # [V, V]
    assert (change[np.abs(differences) > 0.01] > TOLERANCE).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_logit_that_is_not_finite_spoils_its_row(bad: float) -> None:
    """Of the sketch; a difference that is NaN is never below a limit."""
    wrong = logits(96)
    wrong[5, 7] = bad
    with np.errstate(invalid="ignore"):
        found = sketch(wrong)
    assert not np.isfinite(found[5]).any()
    assert np.isfinite(found[6]).all()


def test_every_position_is_stored() -> None:
    """Sketches and log probabilities of all tokens, the prompt's too."""
    fixture = load_fixture("gemma3_text_vocab131_eps")
    assert fixture.sketch.shape == (len(fixture.tokens), COLUMNS)
    assert fixture.log_probs.shape == (len(fixture.tokens) - 1,)


def test_log_probabilities_are_those_of_the_next_token() -> None:
    """In float64, however large the logits are."""
    exact = 500 * logits(101)
    tokens = np.arange(64, dtype=np.int32)
    found = next_log_probs(exact, tokens)
    wide = exact[:-1].astype(np.float64)
    expected = np.diag(wide[:, 1:64]) - np.logaddexp.reduce(wide, axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
