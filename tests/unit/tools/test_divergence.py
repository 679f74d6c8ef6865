"""The k3 estimator against exact divergences."""

import numpy as np
import pytest
from jaxtyping import Float

from tools.divergence import k3


def exact(q: Float[np.ndarray, " V"], p: Float[np.ndarray, " V"]) -> float:
    """Return KL(q ‖ p) in nats."""
    return float(np.sum(q * np.log(q / p)))


@pytest.mark.parametrize("seed", range(5))
def test_k3_is_exact_if_each_token_is_as_frequent_as_it_is_likely(seed: int) -> None:
    """q has multiples of 1/N, and a text of N tokens contains each token N q times."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 50, 12)
    q, p = counts / counts.sum(), rng.dirichlet(np.ones(12))
    tokens = np.repeat(np.arange(12), counts)
    assert k3(np.log(q)[tokens], np.log(p)[tokens]) == pytest.approx(exact(q, p), rel=1e-9)


def test_k3_of_drawn_tokens_is_within_its_standard_error() -> None:
    """It is unbiased: within four standard errors of 100,000 draws, for close and for distant distributions."""
    rng = np.random.default_rng(0)
    for far in (0.01, 0.1, 1.0):
        logits = rng.normal(size=50)
        q, p = (np.exp(x) / np.exp(x).sum() for x in (logits, logits + far * rng.normal(size=50)))
        tokens = rng.choice(50, size=100_000, p=q)
        r = (p / q)[tokens]
        error = np.std(r - 1 - np.log(r)) / np.sqrt(len(tokens))
        assert abs(k3(np.log(q)[tokens], np.log(p)[tokens]) - exact(q, p)) < 4 * error


def test_k3_is_zero_for_equal_distributions_only() -> None:
    """No term is negative. It grows with the square of small differences: 2e-4 in each term is far below 1e-6."""
    logprobs = np.log(np.linspace(0.1, 0.9, 9))
    assert k3(logprobs, logprobs) == 0.0
    assert k3(logprobs, logprobs + 2e-4) == pytest.approx(2e-8, rel=1e-3)
    assert k3(logprobs, logprobs - 2e-4) == pytest.approx(2e-8, rel=1e-3)
    assert k3(logprobs, logprobs + np.where(np.arange(9) == 4, 1e-2, 0.0)) > 1e-6
    with pytest.raises(ValueError, match="at least one token"):
        k3([], [])
