"""Simulation of fleets of 1 to 256 replicas behind a router: real schedulers and prefix caches in virtual time.

    python -m benchmarks.scale.run [SECTION ...] [--jobs 2] [--json FILE]      short main models load assumed windows
    python -m benchmarks.scale.run own --trace chat --replicas 4 16 --rate 1.5 --policy random prefix-aware
    python -m benchmarks.scale.report FILE                                     tables and a plot of the result file

No kernel is timed: the time of a step is computed from its bytes, its FLOP and assumed shares of the peaks in a data
sheet (`benchmarks.scale.step_time`; --bandwidth and --flops change the shares). All work of the host is real: plans,
chunks, pages, windows, hits, evictions, preemptions. `benchmarks.scale.traces` makes the traces,
`benchmarks.scale.routers` has the routers. Every row is a function of its settings and its seed.

The load per replica does not depend on the number of replicas (`RATES`). An answer is good if it is within the trace's
limits of time to first token and time per output token.
"""

import argparse
import functools
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import result_file
from benchmarks.cache import traces
from benchmarks.cache.traces import Line
from benchmarks.scale.routers import POLICIES, Thresholds
from benchmarks.scale.simulate import SERVED, Outcome, check, figures, fleet_of, simulate
from benchmarks.scale.step_time import H200, Assumed
from benchmarks.scale.traces import SHAPES, sessions

LADDER = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ASIDE = 4  # replicas of the other sections
BASIC = ("random", "least-loaded", "prefix-aware")
LONGEST = 65_536  # max_model_len
FEWEST = 4  # replicas per row: small fleets are simulated with several seeds

# Sessions per second and replica of gemma-3-27b: about 70 % of the rate up to which 95 % of the answers are good, found
# by `own --policy prefix-aware --replicas 4 --seconds 200 --warm 120 --rate ...`. Questions have about a quarter of the
# rate that this router sustains: at higher rates the routers that know no prefixes only build queues.
RATES = {"chat": 1.05, "documents": 0.3, "agents": 0.17, "questions": 1.2}
# Seconds that are simulated, starting with empty replicas, and seconds at the start that no figure counts. Questions
# need fewer: their sessions have a single turn.
SPANS = {"chat": (100.0, 60.0), "documents": (100.0, 60.0), "agents": (100.0, 60.0), "questions": (80.0, 40.0)}


@dataclass(frozen=True)
class Case:
    """The settings of one row. `rate` is sessions per second and replica; figures skip the first `warm` `seconds`."""

    section: str
    model: str
    trace: str
    policy: str
    replicas: int
    rate: float
    seconds: float
    warm: float
    seed: int = 1
    bandwidth: float = Assumed.bandwidth
    flops: float = Assumed.flops
    cache_threshold: float = Thresholds.cache_threshold
    abs_threshold: int = Thresholds.abs_threshold
    rel_threshold: float = Thresholds.rel_threshold


def case(section: str, model: str, trace: str, policy: str, replicas: int, share: float = 1.0) -> Case:
    """Return the settings of a row at a share of the usual load."""
    return Case(section, model, trace, policy, replicas, share * rate_of(model, trace), *SPANS[trace])


@functools.cache
def rate_of(model: str, trace: str) -> float:
    """Return sessions per second and replica: the rate of gemma-3-27b, scaled by the device time of a session."""
    return RATES[trace] * _demand("gemma-3-27b", trace) / _demand(model, trace)


def _demand(model: str, trace: str) -> float:
    """Return device seconds of a session: earlier turns are cached, prefill runs full chunks and decode 32 rows."""
    shape, step = SHAPES[trace], fleet_of(model, longest=LONGEST).time
    chunk, rows, context = 2048, 32, shape.shared[1] + shape.first[1] + shape.turns * shape.more[1] / 2
    starts = np.array([int(context)])
    prefill = float(step.seconds(step.work(starts, np.array([chunk]), 0))) / chunk
    decode = float(step.seconds(step.work(np.repeat(starts, rows), np.ones(rows, np.int64), rows))) / rows
    new = shape.first[1] + (shape.turns - 1) * shape.more[1]
    return new * prefill + shape.turns * shape.answer[1] * decode


def main_section() -> Iterator[Case]:
    """Every trace on 1 to 256 replicas; the two routers that query the caches on 16 only."""
    for trace, replicas in product(SHAPES, LADDER):
        for policy in POLICIES if replicas == 16 else BASIC:
            yield case("main", "gemma-3-27b", trace, policy, replicas)


def models_section() -> Iterator[Case]:
    """Other models, on 4 replicas."""
    for model, trace, policy in product(SERVED, SHAPES, (*BASIC, "resume-aware")):
        yield case("models", model, trace, policy, ASIDE)


def load_section() -> Iterator[Case]:
    """Less and more load, on 4 replicas."""
    for trace, share, policy in product(("chat", "questions"), (0.5, 0.75, 1.25, 1.5, 2.0), POLICIES):
        yield case("load", "gemma-3-27b", trace, policy, ASIDE, share)


def assumed_section() -> Iterator[Case]:
    """Half the load, with the assumed shares of the peaks and with half of these shares."""
    for trace, part, policy in product(SHAPES, (1.0, 0.5), POLICIES):
        one = case("assumed", "gemma-3-27b", trace, policy, ASIDE, 0.5)
        yield replace(one, bandwidth=part * Assumed.bandwidth, flops=part * Assumed.flops)


def windows_section() -> Iterator[Case]:
    """The value of knowing windows: routers that know prefixes, at 1.5 times the load, with five seeds."""
    for trace, seed, policy in product(SHAPES, range(1, 6), POLICIES[2:]):
        yield replace(case("windows", "gemma-3-27b", trace, policy, 16, 1.5), seed=seed)


def short_section() -> Iterator[Case]:
    """A check that takes less than a minute."""
    for trace, replicas, policy in product(("chat", "questions"), (1, 4), POLICIES):
        yield replace(case("short", "gemma-3-27b", trace, policy, replicas), seconds=20.0, warm=10.0)


SECTIONS = {
    "main": main_section,
    "models": models_section,
    "load": load_section,
    "assumed": assumed_section,
    "windows": windows_section,
    "short": short_section,
}


def measure(case: Case) -> dict[str, Any]:
    """Simulate one row and return its settings and figures. Asserts the laws of `check`."""
    assumed = Assumed(bandwidth=case.bandwidth, flops=case.flops)
    fleet = fleet_of(case.model, longest=LONGEST, assumed=assumed)
    thresholds = Thresholds(case.cache_threshold, case.abs_threshold, case.rel_threshold)
    shape, outcomes, begin = SHAPES.get(case.trace), list[Outcome](), time.perf_counter()
    for seed in range(case.seed, case.seed + (max(1, FEWEST // case.replicas) if shape else 1)):
        outcomes.append(
            simulate(
                fleet,
                _sessions(case, seed),
                replicas=case.replicas,
                policy=case.policy,
                until=case.seconds,
                warm=case.warm,
                seed=seed,
                thresholds=thresholds,
            )
        )
        check(outcomes[-1])
    limits = (shape.ttft, shape.tpot) if shape else (2.0, 0.1)
    return {**asdict(case), **figures(outcomes, *limits), "host_seconds": time.perf_counter() - begin}


def _sessions(case: Case, seed: int) -> Iterator[list[Line]]:
    if case.trace in SHAPES:
        shape = SHAPES[case.trace]
        return sessions(shape, rate=case.rate, replicas=case.replicas, until=case.seconds, seed=seed)
    found: dict[str, list[Line]] = {}
    for line in traces.read(Path(case.trace)):
        found.setdefault(str(line["session"]), []).append(line)
    return iter(sorted(found.values(), key=lambda lines: float(lines[0]["time"])))


def rows_of(cases: Sequence[Case], jobs: int) -> Iterator[dict[str, Any]]:
    """Measure all rows in `jobs` processes, small fleets first."""
    cases = sorted(cases, key=lambda case: case.replicas)
    if jobs == 1:
        yield from map(measure, cases)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(measure, cases)


def print_row(row: dict[str, Any]) -> None:
    """Print a row on one line."""
    print(
        f"{row['model']:14} {row['trace'][:12]:12} {row['policy']:13} {row['replicas']:4} {row['rate']:7.3f}/s "
        f"hit {row['hit_rate']:6.1%} good {row['good_share']:6.1%} goodput {row['goodput_per_s']:6.3f}/s "
        f"TTFT {row['ttft']['p50']:6.2f} {row['ttft']['p95']:6.2f} {row['ttft']['p99']:6.2f} s "
        f"TPOT {1000 * row['tpot']['p50']:4.0f} {1000 * row['tpot']['p99']:4.0f} ms "
        f"max/mean {row['computed_max_over_mean']:.2f} ({row['host_seconds']:.0f} s)",
        flush=True,
    )


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the settings of a row, rounded as in a file."""
    return tuple(result_file.rounded(row[each.name]) for each in fields(Case))


def read(path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the rows of a file by their `key_of`; no rows if there is no such file."""
    return {key_of(row): row for row in result_file.read(path).get("rows", [])}


def save(path: Path, rows: Iterable[dict[str, Any]], resumed_from: str | None = None) -> None:
    """Write rows and what they assume. `resumed_from`: the commit in the file that some of the rows were read from."""
    order = [*SECTIONS, "own"].index
    found: dict[str, Any] = {
        **({} if resumed_from is None else {"resumed_from": resumed_from}),
        "measured_on_a_gpu": "nothing: step times are computed from bytes, FLOP and assumed shares of peaks",
        "device": asdict(H200),
        "assumed": asdict(Assumed()),
        "rows": sorted(rows, key=lambda row: (order(row["section"]), row["trace"], row["replicas"])),
    }
    result_file.write(path, found)


def _own(args: argparse.Namespace) -> Iterator[Case]:
    for trace, replicas, policy in product(args.trace, args.replicas, args.policy):
        usual = rate_of(args.model, trace) if trace in SHAPES else 0.0
        yield Case(
            "own",
            args.model,
            trace,
            policy,
            replicas,
            usual if args.rate is None else args.rate,
            args.seconds,
            args.warm,
            args.seed,
            args.bandwidth,
            args.flops,
            args.cache_threshold,
            args.abs_threshold,
            args.rel_threshold,
        )


def main() -> None:
    """Print a line per row; write JSON if it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, "own"], default=["short"], help="default: short")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", type=Path, help="result file, written after every row; rows in it are not run again")
    parser.add_argument("--model", choices=list(SERVED), default="gemma-3-27b", help="this and all below: for `own`")
    parser.add_argument("--trace", nargs="+", default=["chat"], help=f"{', '.join(SHAPES)}, or a trace file")
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--replicas", nargs="+", type=int, default=[8], help="replicas of each fleet")
    parser.add_argument("--rate", type=float, help="sessions per second and replica")
    parser.add_argument("--seconds", type=float, default=100.0, help="simulated seconds")
    parser.add_argument("--warm", type=float, default=60.0, help="seconds at the start that no figure counts")
    for name in ("seed", "bandwidth", "flops", "cache_threshold", "abs_threshold", "rel_threshold"):
        default = getattr(Case, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    args = parser.parse_args()
    print("No kernel is timed: step times come from bytes, FLOP and assumed shares of peaks.", file=sys.stderr)
    cases = [case for name in args.sections for case in (_own(args) if name == "own" else SECTIONS[name]())]
    rows = read(args.json) if args.json else {}
    resumed_from = result_file.read(args.json).get("commit") if rows else None
    for row in rows_of([each for each in cases if key_of(asdict(each)) not in rows], args.jobs):
        print_row(row)
        rows[key_of(row)] = row
        if args.json:
            save(args.json, rows.values(), resumed_from)


if __name__ == "__main__":
    main()
