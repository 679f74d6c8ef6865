"""The check of the sampling kernels: the tokens of rows with all kinds of limits, as numpy finds them in float64."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jswa.exec.programs.logits_state import init_logits_state
from jswa.exec.programs.sampling import kernels
from jswa.exec.programs.sampling.rows import Sampling
from jswa.exec.programs.sampling.xla import row_keys
from jswa.exec.selfcheck.cases import Case, CheckedEngine
from jswa.plan import SAMPLING, SAMPLING_REALS

_ROWS = 16  # more run the same code

_LIMITS: tuple[dict[str, float], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.1},
    {"temperature": 0.9, "top_n_sigma": 1.0},
)


def sampling_cases(engine: CheckedEngine) -> Iterator[Case]:
    """Yield a check of a few rows."""
    rows, vocab = min(_ROWS, max(bucket.rows for bucket in engine.chosen)), engine.model.vocab_size
    run = partial(_sampling_results, rows, vocab)
    yield Case(f"sampling kernels {engine.kernels.sampling!r}, {rows} rows of {vocab} logits", run)


def _sampling_results(rows: int, vocab: int) -> tuple[Int[Array, " R"], Int[Array, " R"]]:
    """Return the tokens of rows with all kinds of limits, drawn by the kernels and by numpy."""
    rng = np.random.default_rng(0)
    logits = 2.5 * rng.standard_normal((rows, vocab), np.float32)
    likely = rng.integers(0, vocab, (rows, 20))
    np.add.at(logits, (np.arange(rows)[:, None], likely), 18 - np.arange(20, dtype=np.float32))
    own, at = Sampling.of(jnp.asarray(_columns(rows))), jnp.arange(rows, dtype=jnp.int32)

    @jax.jit
    def draw(logits: Array, own: Sampling, at: Array) -> tuple[Int[Array, " R"], Float[Array, "R V"]]:
        noise = jax.vmap(lambda key: jax.random.gumbel(key, (vocab,), jnp.float32))(row_keys(own.keys, at))
        return kernels.sample(logits, at, own, init_logits_state(1, vocab), jnp.ones(rows, bool)).tokens, noise

    found, noise = draw(jnp.asarray(logits), own, at)
    expected = [
        _drawn(
            logits[row].astype(np.float64), np.asarray(noise[row]), {"temperature": 0.0, **_LIMITS[row % len(_LIMITS)]}
        )
        for row in range(rows)
    ]
    return found, jnp.asarray(expected, jnp.int32)


def _drawn(logits: Float[np.ndarray, " V"], noise: Float[np.ndarray, " V"], limits: dict[str, float]) -> int:
    """Return the token of a row with no limit or one, from tokens without ties."""
    if not limits["temperature"]:
        return int(logits.argmax())
    scaled = (logits - logits.max()) / limits["temperature"]
    order = np.argsort(-scaled)
    share = np.exp(scaled[order])
    before = np.cumsum(share) - share
    kept = before < limits.get("top_p", 1.0) * share.sum()
    kept &= share >= limits.get("min_p", 0.0)
    sigmas = limits.get("top_n_sigma", 0.0)
    kept &= (scaled[order] >= -sigmas * scaled.std()) | (sigmas == 0)
    kept &= np.arange(len(order)) < (limits.get("top_k") or len(order))
    return int(order[np.where(kept, scaled[order] + noise[order], -np.inf).argmax()])


def _columns(rows: int) -> Int[np.ndarray, "R C"]:
    """Return packed parameters of rows whose limits take turns, each with a key of its own."""
    columns = []
    for name in SAMPLING:
        default = {"top_p": 1.0, "repetition": 1.0, "logits_state": 2**30}.get(name, 0)
        values = [_LIMITS[row % len(_LIMITS)].get(name, default) for row in range(rows)]
        values = list(range(rows)) if name == "key_low" else values
        real = name in SAMPLING_REALS
        columns.append(np.array(values, np.float32 if real else np.int32).view(np.int32))
    return np.stack(columns, axis=1)
