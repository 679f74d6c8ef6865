"""Host time and memory of a request with penalties, biases or masks, beyond that of a plain request.

    python -m benchmarks.speed.logits_state_overhead [--vocab 262144] [--prompt 50] [--json FILE]

Each request is made, queued, admitted in a step with others, and turned into launches; nothing runs on a device. Prints
medians of the CPU time per request in µs: of its constraint, which a server makes in a thread beside the engine's, and
of the engine's thread beyond a plain request of the same round, with the 10th and 90th percentile. Then the bytes that
it holds while it waits (beside its prompt), and the bytes and launches of its admission.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import result_file
from benchmarks.speed.host_overhead import gemma3_27b
from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.exec.launches import ProgramLaunch, logits_launches
from jswa.plan import Constraint, Request, StepPlan
from jswa.sched.constraint import make_constraint
from jswa.sched.scheduler import Scheduler
from jswa.types import SamplingParams

Launches = Callable[[StepPlan, int], list[ProgramLaunch]]
ROUNDS, ROWS = 60, 8
STOPS = frozenset([1, 106])
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "repetition": {"repetition_penalty": 1.05},
    "frequency": {"frequency_penalty": 0.5},
    "min_tokens": {"min_tokens": 16},
    "logit_bias, 10": {"logit_bias": dict.fromkeys(range(10), -1.0)},
    "logit_bias, 1,024": {"logit_bias": dict.fromkeys(range(1024), -1.0)},
    "allowed ids, 100": {"allowed_token_ids": list(range(100))},
    "repetition + allowed": {"repetition_penalty": 1.05, "allowed_token_ids": list(range(100))},
    "all of these": {
        "repetition_penalty": 1.05,
        "min_tokens": 16,
        "logit_bias": dict.fromkeys(range(1024), -1.0),
        "allowed_token_ids": list(range(0, 32_768, 10)),
    },
}


def launches_of(plan: StepPlan, vocab: int) -> list[ProgramLaunch]:
    """Return the launches of a plan's logits state."""
    return list(logits_launches(plan.logits_state, plan.masks, ROWS, vocab)) if plan.logits_state else []


def held(constraint: Constraint | None) -> int:
    """Return the bytes of a waiting request's arrays."""
    parts = [
        *(constraint or ()),
        *(constraint.allowed if constraint else ()),
        *(constraint.early if constraint else ()),
    ]
    return sum(part.nbytes for part in parts if isinstance(part, np.ndarray))


def measure(
    params: dict[str, Any], vocab: int, prompt: int, number: int, launches: Launches = launches_of
) -> dict[str, float]:
    """Return µs per request of `ROWS` that are admitted together, and the bytes of one of them."""
    layout, limits = KVLayout.of(gemma3_27b(), 64), Limits(2**12, ROWS, 8192, 64, num_slabs=5_000, prefix_cache=False)
    given, scheduler = SamplingParams(**params), Scheduler(layout, limits)
    prompts = np.random.default_rng(number).integers(0, vocab, (ROWS, prompt)).astype(np.int32)
    start = time.thread_time()
    constraints = [make_constraint(given, vocab, prompt, STOPS, ()) for _ in range(ROWS)]
    made = time.thread_time()
    for row, constraint in enumerate(constraints):
        scheduler.add(Request(str(row), prompts[row], given, STOPS, (0, row), prompt + 99, constraint=constraint))
    plan = scheduler.plan()
    assert plan is not None
    sent = launches(plan, vocab)
    end = time.thread_time()
    assert plan.num_rows == ROWS, "a request was not admitted"
    return {
        "made": 1e6 * (made - start) / ROWS,
        "engine": 1e6 * (end - made) / ROWS,
        "waiting": held(constraints[0]),
        "uploaded": sum(np.asarray(array).nbytes for launch in sent for array in launch.arrays) / ROWS,
        "launches": len(sent) / ROWS,
    }


def main() -> None:
    """Print a line per kind of request; write JSON if it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=262_144, help="tokens of the vocabulary")
    parser.add_argument("--prompt", type=int, default=50, help="tokens of each prompt")
    parser.add_argument("--json", type=Path, help="result file to write")
    args = parser.parse_args()
    rounds = [
        {kind: measure(params, args.vocab, args.prompt, n) for kind, params in KINDS.items()} for n in range(ROUNDS)
    ]
    print(f"{'request':22} {'made':>6} {'beyond plain (p10 to p90)':>26} {'waiting':>9} {'uploaded':>9} launches")
    results: list[dict[str, Any]] = []
    for kind in KINDS:
        found = {name: statistics.median(r[kind][name] for r in rounds) for name in rounds[0][kind]}
        beyond = sorted(r[kind]["engine"] - r["plain"]["engine"] for r in rounds)
        spread = {"beyond": statistics.median(beyond), "p10": beyond[ROUNDS // 10], "p90": beyond[-ROUNDS // 10]}
        results.append({"request": kind, "vocab": args.vocab, "prompt": args.prompt, **found, **spread})
        shown = f"{spread['beyond']:.1f} ({spread['p10']:.0f} to {spread['p90']:.0f})"
        sizes = f"{found['waiting']:9.0f} {found['uploaded']:9.0f} {found['launches']:8.2f}"
        print(f"{kind:22} {found['made']:6.1f} {shown:>26} {sizes}")
    if args.json:
        result_file.write(args.json, {"requests": results})


if __name__ == "__main__":
    main()
