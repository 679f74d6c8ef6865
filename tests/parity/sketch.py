"""The part of a fixture's logits that is stored: a linear sketch of every position, and log probabilities.

`sketch` maps the V logits of a position to COLUMNS numbers. Each logit belongs to one column and counts there with a
weight of its own, between 1 and 1.5 in absolute value. A comparison of sketches at the tolerance of logits is as strong
as a comparison of the logits, in an eighth of the bytes:

* An error of one logit changes its column by at least its own size. So no single logit, at any position, may be off by
  more than the tolerance, give or take the rounding noise of the other logits in its column (3.6 times that of one
  logit, for V = 96).
* Two swapped logits differ in weight, so they show in their columns even if they share one.
* A position that is wrong as a whole (a window off by one, a wrong norm) has errors in all logits. Each column then
  sees about 3.6 times the error of one logit, and all columns would have to cancel at every wrong position at once.
* A constant added to all logits shows, because the weights of a column do not add up to 0.
* A logit that is NaN or infinite makes its whole row NaN or infinite.

An error is missed only if it cancels in every column, that is, if it lies in the null space of a fixed random matrix.
Over all fixtures, with the engine's own noise and the limit of 1.5e-4 in test_dense_parity.py: an error of 2e-4 in one
logit at one position is detected in 99.998 % of the cases, and one of 3e-4 in all of them.
tests/unit/parity/test_sketch.py checks all of this.

NumPy only: the torch side and the tests share this module.
"""

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

COLUMNS = 12


def sketch(logits: NDArray[Any]) -> NDArray[np.float32]:
    """Return the sketch [..., COLUMNS] of logits [..., V], summed in float64."""
    return np.asarray(logits.astype(np.float64) @ weights(logits.shape[-1]), np.float32)


@functools.cache
def weights(vocab: int) -> NDArray[np.float64]:
    """Return the matrix [V, COLUMNS] of `sketch`: one number in each row, no two equal ones in a column."""
    rng = np.random.default_rng([20, vocab])
    rank = rng.permutation(vocab)
    sign = rng.choice([-1.0, 1.0], vocab)
    matrix = np.zeros((vocab, COLUMNS))
    matrix[np.arange(vocab), rank % COLUMNS] = sign * (1 + 0.5 * (rank // COLUMNS) / ((vocab - 1) // COLUMNS))
    return matrix


def next_log_probs(logits: NDArray[Any], tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """Return the log probability [T - 1] of each token after the first, from logits [T, V] and tokens [T]."""
    wide = logits[:-1].astype(np.float64)
    top = wide.max(axis=-1)
    total = top + np.log(np.exp(wide - top[:, None]).sum(axis=-1))
    return np.asarray(wide[np.arange(len(wide)), tokens[1:]] - total, np.float32)
