"""Draws of random rows beside those of a reference in float64.

    python -m benchmarks.gpu.kernels.draws [--implementation triton] [--rows 100000] [--json FILE]

A row has random logits, temperature and limits, and a key. Its token is `equal` to that of the reference; or `close`:
float64 finds the two scores, or the limits' edge at one of the two tokens, nearer than float32 can tell apart; or
`wrong`. Exits with 1 if any is wrong. "xla" runs on any machine, "triton" on a GPU.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from benchmarks import result_file
from jswa.exec.programs.logits_state import init_logits_state
from jswa.exec.programs.sampling import kernels, xla
from jswa.exec.programs.sampling.rows import Sampling
from jswa.plan import SAMPLING, SAMPLING_REALS

_SIZES = ((1_000, 4_000, 0.96), (32_000, 125, 0.03), (201_088, 20, 0.01))  # tokens, rows at a time, share of the rows
LIMITS = ("temperature", "top_k", "top_p", "min_p", "top_n_sigma")
_CLOSE = 2e-5  # of a score or of a mass, in float32
_TINY = float(np.finfo(np.float32).tiny)


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", choices=("triton", "xla"), default="triton")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3_600, help="after which no further rows are drawn")
    parser.add_argument("--json", type=Path, help="result file to write")
    args = parser.parse_args()
    rng, end = np.random.default_rng(args.seed), time.monotonic() + args.seconds
    found: dict[str, Any] = {"device": jax.devices()[0].device_kind, "implementation": args.implementation, "rows": []}
    for vocab, count, share in _SIZES:
        tally = {"vocab": vocab, "equal": 0, "close": 0, "wrong": 0, "examples": []}
        for _ in range(max(1, round(args.rows * share / count))):
            if time.monotonic() < end:
                compare(vocab, count, args.implementation, rng, tally)
        found["rows"].append(tally)
        print(json.dumps(tally), flush=True)
    if args.json:
        result_file.write(args.json, found)
    sys.exit(any(tally["wrong"] for tally in found["rows"]))


def compare(vocab: int, count: int, implementation: str, rng: np.random.Generator, tally: dict[str, Any]) -> None:
    """Draw a token of each of so many random rows, and count how they compare."""
    logits, columns = random_rows(vocab, count, rng)
    rows = Sampling.of(jnp.asarray(columns))
    at = jnp.asarray(rng.integers(0, 100_000, count), jnp.int32)
    tokens = np.asarray(_draw(jnp.asarray(logits), at, rows, implementation))
    uniform = np.asarray(uniform_of(xla.row_keys(rows.keys, at), vocab), np.float64)
    for start in range(0, count, 250):  # float64 takes memory
        part = slice(start, start + 250)
        own = Sampling(*(np.asarray(values)[part] for values in rows))  # type: ignore[arg-type]
        equal, close = judged(logits[part].astype(np.float64), own, uniform[part], tokens[part])
        tally["equal"] += int(equal.sum())
        tally["close"] += int((close & ~equal).sum())
        wrong = np.flatnonzero(~close & ~equal)
        tally["wrong"] += len(wrong)
        for row in wrong[: 3 - len(tally["examples"])]:
            limits = {name: float(getattr(own, name)[row]) for name in LIMITS}
            tally["examples"].append({**limits, "token": int(tokens[part][row])})


def random_rows(
    vocab: int, count: int, rng: np.random.Generator
) -> tuple[Float[np.ndarray, "R V"], Int[np.ndarray, "R C"]]:
    """Return logits from peaked to flat, some with ties, and packed parameters."""
    logits = rng.standard_normal((count, vocab), np.float32) * 2 ** rng.uniform(-3, 4, (count, 1)).astype(np.float32)
    ties = rng.random(count) < 0.2
    logits[ties] = np.round(logits[ties])
    kind = rng.random((count, 4))
    values: dict[str, Any] = {
        "temperature": np.where(kind[:, 0] < 0.1, 0, 2 ** rng.uniform(-4, 2, count)),
        "top_k": np.where(kind[:, 1] < 0.6, 0, np.exp(rng.uniform(0, np.log(2 * vocab), count))).astype(np.int32),
        "top_p": np.where(kind[:, 2] < 0.4, 1, rng.random(count)),
        "min_p": np.where(kind[:, 3] < 0.7, 0, rng.random(count) ** 3),
        "top_n_sigma": np.where(rng.random(count) < 0.7, 0, rng.uniform(0.1, 4, count)),
        "key_high": rng.integers(0, 2**31, count),
        "key_low": rng.integers(0, 2**31, count),
    }
    plain = {"repetition": 1.0, "logits_state": 2**30}
    columns = []
    for name in SAMPLING:
        real = name in SAMPLING_REALS
        value = np.broadcast_to(values.get(name, plain.get(name, 0)), count)
        columns.append(value.astype(np.float32 if real else np.int32).view(np.int32))
    return logits, np.stack(columns, axis=1)


def judged(
    logits: Float[np.ndarray, "R V"], rows: Any, uniform: Float[np.ndarray, "R V"], tokens: Int[np.ndarray, " R"]
) -> tuple[Bool[np.ndarray, " R"], Bool[np.ndarray, " R"]]:
    """Return which tokens are those of float64, and which cannot be told apart from them in float32."""
    lines = np.arange(len(logits))
    warm = np.where(rows.temperature > 0, rows.temperature, 1).astype(np.float64)[:, None]
    distance = (logits.max(axis=1, keepdims=True) - logits) / warm
    order = np.argsort(distance, axis=1, kind="stable")
    ranked = np.take_along_axis(distance, order, axis=1)
    first = np.array([np.searchsorted(line, line) for line in ranked])  # of tokens as likely, how many are more likely
    more = np.empty_like(first)
    np.put_along_axis(more, order, first, axis=1)
    slack = np.minimum(_slack_of_min_p(distance, rows), _slack_of_sigmas(distance, rows))
    kept = slack >= 0
    wanted = np.where(rows.top_k > 0, rows.top_k, logits.shape[1])[:, None]
    kth = np.take_along_axis(ranked, np.minimum(wanted, logits.shape[1]) - 1, axis=1)
    tied = np.abs(distance - kth) <= _CLOSE / 10 * (1 + kth)  # with the k-th, as far as float32 can tell
    tied &= more >= wanted
    kept &= more < wanted
    mass = np.where(kept, np.exp(-distance), 0)
    beyond = np.where(tied & (slack >= 0), np.exp(-distance), 0).sum(axis=1, keepdims=True)
    beyond /= mass.sum(axis=1, keepdims=True)
    mass /= mass.sum(axis=1, keepdims=True)
    sums = np.cumsum(np.take_along_axis(mass, order, axis=1), axis=1)
    before = np.where(more > 0, np.take_along_axis(sums, np.maximum(more - 1, 0), axis=1), 0)
    enough = np.maximum(rows.top_p.astype(np.float64), _TINY)[:, None]
    nucleus = enough - before  # positive: kept
    limited = rows.top_p[:, None] < 1
    noise = -np.log(-np.log(np.maximum(uniform, _TINY)))
    score = np.where(kept & (~limited | (nucleus > 0)), noise - distance, -np.inf)
    greedy = rows.temperature == 0
    best = np.where(greedy, logits.argmax(axis=1), score.argmax(axis=1))
    # Where float32 may differ: at the edges, and among scores.
    may = (slack >= -_CLOSE) & ((more < wanted) | tied) & (~limited | (nucleus > -_CLOSE - beyond))
    sure = kept & (~limited | (nucleus > _CLOSE)) & (slack > _CLOSE)
    tolerance = _CLOSE * (1 + distance)
    upper = np.where(may, noise - distance, -np.inf)
    least = np.where(sure, noise - distance - tolerance, -np.inf).max(axis=1)
    own = np.clip(tokens, 0, logits.shape[1] - 1)
    close = (upper + tolerance)[lines, own] >= least
    return tokens == best, (tokens >= 0) & ~greedy & close


def _slack_of_min_p(distance: Float[np.ndarray, "R V"], rows: Any) -> Float[np.ndarray, "R V"]:
    """Return how far inside the limit of min-p tokens are, relative to the limit."""
    least = rows.min_p.astype(np.float64)[:, None]
    reach = np.where(least > 0, -np.log(np.maximum(least, _TINY)), np.inf)
    return np.where(least > 0, (reach - distance) / (1 + distance), 1.0)


def _slack_of_sigmas(distance: Float[np.ndarray, "R V"], rows: Any) -> Float[np.ndarray, "R V"]:
    """Return the same of top-n-sigma."""
    sigmas = rows.top_n_sigma.astype(np.float64)[:, None]
    reach = sigmas * distance.std(axis=1, keepdims=True)
    return np.where(sigmas > 0, (reach - distance) / (1 + distance), 1.0)


def _draw(logits: Any, at: Any, rows: Sampling, implementation: str) -> Any:
    logits_state = init_logits_state(1, logits.shape[1])
    if implementation == "xla":
        return jax.jit(xla.sample)(logits, at, rows, logits_state)
    return jax.jit(kernels.sample)(logits, at, rows, logits_state, jnp.ones(len(logits), bool)).tokens


def uniform_of(keys: Any, vocab: int) -> Any:
    """Return the uniform numbers [R, V] from which noise is made, under the keys of draws."""
    return jax.jit(jax.vmap(lambda key: jax.random.uniform(key, (vocab,), jnp.float32)))(keys)


if __name__ == "__main__":
    main()
