"""Cases of sampling: rows of logits and limits that the kernels must draw from as XLA does."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float


class Row(NamedTuple):
    """One row: what its logits are like, and its limits."""

    logits: str = "wide"
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    top_n_sigma: float = 0.0


KINDS = ("wide", "flat", "ties", "peaked", "two", "huge", "far below zero", "forbidden", "impossible", "broken")
ROWS = (
    *(Row(kind, temperature=0.0) for kind in KINDS),
    *(Row(kind) for kind in KINDS),
    *(Row(kind, top_p=0.9) for kind in KINDS),
    *(Row(kind, top_k=5) for kind in KINDS),
    *(Row(kind, 0.7, 40, 0.95) for kind in KINDS),
    *(Row(kind, 1.5, min_p=0.05) for kind in KINDS),
    *(Row(kind, 0.8, top_n_sigma=1.0) for kind in KINDS),
    *(Row("wide", 2.0, top_n_sigma=sigmas) for sigmas in (1e-3, 0.3, 2.5, 100.0)),
    Row("wide", 1.5, top_k=30, top_p=0.9, min_p=1e-3, top_n_sigma=1.5),
    *(Row("wide", top_p=share) for share in (1e-30, 0.1, 0.5, 0.999, 1 - 2**-24)),
    *(Row("wide", top_k=count) for count in (1, 2, 300, 10_000, 2**31 - 1)),
    *(Row("wide", temperature) for temperature in (1e-4, 0.1, 100.0)),
    *(Row("wide", temperature, top_p=0.8) for temperature in (1e-4, 0.1, 100.0)),
    Row("ties", top_k=3, top_p=0.5, min_p=0.2),
    Row("wide", 0.6, top_k=20, top_p=0.95, min_p=0.01),
)


def make_logits(kind: str, vocab: int, rng: np.random.Generator) -> Float[np.ndarray, " V"]:
    """Return a row of logits of a certain kind."""
    noise = rng.standard_normal(vocab)
    makers: dict[str, Callable[[], np.ndarray]] = {
        "wide": lambda: 3 * noise,
        "flat": lambda: np.zeros(vocab),
        "ties": lambda: rng.integers(-2, 3, vocab),
        "peaked": lambda: np.where(np.arange(vocab) == rng.integers(vocab), 30.0, noise),
        "two": lambda: np.where(rng.permutation(vocab) < 2, 20.0, -20.0),
        "huge": lambda: 1e30 * noise,
        "far below zero": lambda: noise - 5e4,
        "forbidden": lambda: np.where(rng.random(vocab) < 0.9, -np.inf, 4 * noise),
        "impossible": lambda: np.full(vocab, -np.inf),
        "broken": lambda: np.where(np.arange(vocab) == vocab // 2, np.nan, noise),
    }
    return np.asarray(makers[kind](), np.float32)


# Vocabularies of released models, and rows of a step; the benchmark measures as many as it has time for.
SHAPES = {
    "gpt-oss-20b, 256 rows": (256, 201_088),
    "gemma-3-27b, 64 rows": (64, 262_144),
    "gpt-oss-20b, 1 row": (1, 201_088),
    "Mistral-7B, 64 rows": (64, 32_000),
}
