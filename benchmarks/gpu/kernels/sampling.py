"""Sampling of a step's logits on XLA and on Triton: microseconds, and whether the tokens are the same.

    python -m benchmarks.gpu.kernels.sampling [--json FILE] [--implementations xla triton] [--smoke]

Logits are a bulk of normal numbers with a few dozen likely tokens above it, or none where they are flat; all rows have
the same limits. Limits are
arguments, so each implementation is compiled four times for each shape. Triton is left out where jax-triton is not
installed, which the result file says. Needs a GPU, except for --smoke.
"""

import argparse
import importlib.util
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from benchmarks import result_file
from benchmarks.gpu.kernels.device_time import calls_worth_timing, programs_of, time_programs
from jswa.exec.programs.logits_state import init_logits_state
from jswa.exec.programs.sampling import kernels, xla
from jswa.exec.programs.sampling.rows import Sampling
from jswa.plan import SAMPLING, SAMPLING_REALS
from jswa.ribs.logprobs.traced import drawn
from jswa.types import MAX_LOGPROBS
from pallas_kernels.sampling.api import Implementation
from tools.cases.kernels.small.sampling import SHAPES

LIMITS: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top-p": {"temperature": 1.0, "top_p": 0.95},
    "top-k and top-p": {"temperature": 0.7, "top_k": 40, "top_p": 0.95},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "flat, top-p": {"temperature": 1.0, "top_p": 0.95},
    "greedy, log probabilities": {},
}
SMOKE = {"smoke, 2 rows": (2, 500)}
Programs = list[tuple[int, Callable[..., Any]]]  # see `programs_of`
_COPIES = 3  # of logits, which together are larger than the cache
_GUESS = 500e-6  # seconds of a call, to choose the number of calls


def main() -> None:
    """Measure and print; write JSON if it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementations", nargs="+", default=list(get_args(Implementation)), help="to measure")
    parser.add_argument("--smoke", action="store_true", help="small sizes on any machine; the figures mean nothing")
    parser.add_argument("--seconds", type=float, default=3600, help="after which nothing is measured")
    parser.add_argument("--json", type=Path, help="result file to write")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    there = importlib.util.find_spec("jax_triton") is not None and jax.default_backend() == "gpu"
    chosen = [name for name in args.implementations if name != "triton" or there]
    left_out = [name for name in args.implementations if name not in chosen]
    results: dict[str, Any] = {"device": jax.devices()[0].device_kind, "left out": left_out, "sampling": []}
    if left_out:
        print(f"left out, without a GPU or jax-triton: {', '.join(left_out)}", flush=True)
    for name, (rows, vocab) in (SMOKE if args.smoke else SHAPES).items():
        peaked, flat = ([_logits(rows, vocab, seed, likely) for seed in range(_COPIES)] for likely in (60, 0))
        plain, logs = ({each: programs_for(vocab, each, logs) for each in chosen} for logs in (False, True))
        for limits, values in LIMITS.items():
            programs, logits = logs if "log" in limits else plain, flat if "flat" in limits else peaked
            if time.monotonic() > end:
                return
            row = {"logits": name, "limits": limits, **compared(programs, logits, _columns(rows, values))}
            results["sampling"].append(row)
            print(f"{name:26}{limits:18}{row}", flush=True)
            if args.json:  # after each measure, because a run may be cut off
                result_file.write(args.json, results)


def programs_for(vocab: int, implementation: Implementation, logprobs: bool) -> Programs:
    """Return the programs to time, which are compiled when they first run."""
    draw = partial(_draw, logits_state=init_logits_state(1, vocab), implementation=implementation, logprobs=logprobs)
    return programs_of(draw, calls_worth_timing(_GUESS))


def compared(
    programs: Mapping[Implementation, Programs], logits: list[Float[Array, "R V"]], columns: Int[Array, "R C"]
) -> dict[str, Any]:
    """Return microseconds of each implementation, and how many of the rows' tokens differ from the first one's."""
    found, row = list[Int[Array, " R"]](), dict[str, Any]()
    for implementation, own in programs.items():
        given = [(logits[n % len(logits)], jnp.int32(n), columns) for n in range(own[-1][0])]
        timing = time_programs(own, given)
        found.append(own[0][1](*given[: own[0][0]])[0][0])
        row[f"{implementation}, us"] = round(1e6 * timing.median, 1)
        row[f"{implementation}, tokens that differ"] = int((found[-1] != found[0]).sum())
    return row


def _draw(
    logits: Float[Array, "R V"],
    position: Int[Array, ""],
    columns: Int[Array, "R C"],
    *,
    logits_state: Any,
    implementation: Implementation,
    logprobs: bool,
) -> tuple[Int[Array, " R"], Any]:
    rows, at = Sampling.of(columns), jnp.broadcast_to(position, len(logits))
    if implementation == "triton":
        finite, top = jnp.ones(len(logits), bool), MAX_LOGPROBS if logprobs else None
        found = kernels.sample(logits, at, rows, logits_state, finite, top=top)
        return found.tokens, found.logprobs
    tokens = xla.sample(logits, at, rows, logits_state, few=xla.few_rows(len(logits)))
    if not logprobs:
        return tokens, None
    return tokens, drawn(logits, tokens, *xla.limits_of(logits, at, rows, logits_state))


def _logits(rows: int, vocab: int, seed: int, likely: int) -> Float[Array, "R V"]:
    rng = np.random.default_rng(seed)
    out = rng.standard_normal((rows, vocab), np.float32) * 2.5
    chosen = rng.integers(0, vocab, (rows, likely))
    np.add.at(out, (np.arange(rows)[:, None], chosen), 18 - rng.exponential(3.0, chosen.shape))
    return jnp.asarray(out)


def _columns(rows: int, values: dict[str, float]) -> Int[Array, "R C"]:
    """Return packed parameters of rows without constraints, each with a key of its own."""
    plain = {"top_p": 1.0, "repetition": 1.0, "logits_state": 2**30, **values}
    columns = []
    for name in SAMPLING:
        real = name in SAMPLING_REALS
        value = np.full(rows, plain.get(name, 0), np.float32 if real else np.int32)
        columns.append(np.arange(rows, dtype=np.int32) if name == "key_low" else value.view(np.int32))
    return jnp.asarray(np.stack(columns, axis=1))


if __name__ == "__main__":
    main()
