"""Fleets past this machine: traces in public shapes through N real schedulers and prefix caches, in virtual time.

    python -m benchmarks.scale.run [SECTION ...] [--jobs 2] [--json FILE]      short main models load assumed windows
    python -m benchmarks.scale.run own --trace chat --replicas 4 16 --rate 1.5 --policy random prefix-aware
    python -m benchmarks.scale.report FILE                                     tables and plot of what was written

No kernel was timed: the step time comes from bytes, FLOP and assumed shares of a data sheet's peaks
(benchmarks/scale/step_time.py; --bandwidth and --flops change the shares). What is real is everything on the host:
plans, chunks, pages, windows, hits, evictions, preemptions. Traces are in benchmarks/scale/traces.py, routers in
benchmarks/scale/routers.py. Every row is a function of its settings and its seed.

Load is the same per replica whatever their number (`RATES`). A good answer keeps the trace's limits of time to the
first token and time per later token.
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
FEWEST = 4  # replicas that a row is made of, with several seeds if need be

# Sessions a second and replica of gemma-3-27b: about 70 % of the rate up to which 95 % of the answers are good, found
# by `own --policy prefix-aware --replicas 4 --seconds 200 --warm 120 --rate ...`. Questions have less, about a quarter
# of what that router carries: with more, the routers that know no prefixes only queue.
RATES = {"chat": 1.05, "documents": 0.3, "agents": 0.17, "questions": 1.2}
# Seconds that are simulated, from empty replicas on, and those at the start that count in no figure. Users come back
# to chats and agents, to questions they do not.
SPANS = {"chat": (100.0, 60.0), "documents": (100.0, 60.0), "agents": (100.0, 60.0), "questions": (80.0, 40.0)}


@dataclass(frozen=True)
class Case:
    """One row: a setting. `rate`: sessions a second and replica; `warm` of its `seconds` count in no figure."""

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
    """A row at a share of the usual load."""
    return Case(section, model, trace, policy, replicas, share * rate_of(model, trace), *SPANS[trace])


@functools.cache
def rate_of(model: str, trace: str) -> float:
    """Sessions a second and replica: those of gemma-3-27b, times how much less a session takes of a replica's time."""
    return RATES[trace] * _demand("gemma-3-27b", trace) / _demand(model, trace)


def _demand(model: str, trace: str) -> float:
    """Device seconds of a session whose earlier turns are cached, prompts in full chunks and decode in rows of 32."""
    shape, step = SHAPES[trace], fleet_of(model, longest=LONGEST).time
    chunk, rows, context = 2048, 32, shape.shared[1] + shape.first[1] + shape.turns * shape.more[1] / 2
    starts = np.array([int(context)])
    prefill = float(step.seconds(step.work(starts, np.array([chunk]), 0))) / chunk
    decode = float(step.seconds(step.work(np.repeat(starts, rows), np.ones(rows, np.int64), rows))) / rows
    new = shape.first[1] + (shape.turns - 1) * shape.more[1]
    return new * prefill + shape.turns * shape.answer[1] * decode


def main_section() -> Iterator[Case]:
    """Every trace from 1 to 256 replicas; the two routers that ask the caches at 16."""
    for trace, replicas in product(SHAPES, LADDER):
        for policy in POLICIES if replicas == 16 else BASIC:
            yield case("main", "gemma-3-27b", trace, policy, replicas)


def models_section() -> Iterator[Case]:
    """Other models, at 4 replicas."""
    for model, trace, policy in product(SERVED, SHAPES, (*BASIC, "resume-aware")):
        yield case("models", model, trace, policy, ASIDE)


def load_section() -> Iterator[Case]:
    """Less and more load, at 4 replicas."""
    for trace, share, policy in product(("chat", "questions"), (0.5, 0.75, 1.25, 1.5, 2.0), POLICIES):
        yield case("load", "gemma-3-27b", trace, policy, ASIDE, share)


def assumed_section() -> Iterator[Case]:
    """Half of the assumed shares of the peaks, at half of the load; and half of the load alone."""
    for trace, part, policy in product(SHAPES, (1.0, 0.5), POLICIES):
        one = case("assumed", "gemma-3-27b", trace, policy, ASIDE, 0.5)
        yield replace(one, bandwidth=part * Assumed.bandwidth, flops=part * Assumed.flops)


def windows_section() -> Iterator[Case]:
    """What knowing windows is worth: the routers that know prefixes at half more load, five seeds."""
    for trace, seed, policy in product(SHAPES, range(1, 6), POLICIES[2:]):
        yield replace(case("windows", "gemma-3-27b", trace, policy, 16, 1.5), seed=seed)


def short_section() -> Iterator[Case]:
    """Less than a minute: what a change must not break."""
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
    """One row of the report. Asserts the laws of `check` on the way."""
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
    """All rows, small fleets first, in `jobs` processes."""
    cases = sorted(cases, key=lambda case: case.replicas)
    if jobs == 1:
        yield from map(measure, cases)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(measure, cases)


def print_row(row: dict[str, Any]) -> None:
    """One line."""
    print(
        f"{row['model']:14} {row['trace'][:12]:12} {row['policy']:13} {row['replicas']:4} {row['rate']:7.3f}/s "
        f"hit {row['hit_rate']:6.1%} good {row['good_share']:6.1%} goodput {row['goodput_per_s']:6.3f}/s "
        f"TTFT {row['ttft']['p50']:6.2f} {row['ttft']['p95']:6.2f} {row['ttft']['p99']:6.2f} s "
        f"TPOT {1000 * row['tpot']['p50']:4.0f} {1000 * row['tpot']['p99']:4.0f} ms "
        f"max/mean {row['computed_max_over_mean']:.2f} ({row['host_seconds']:.0f} s)",
        flush=True,
    )


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """The settings of a row, rounded as a file has them."""
    return tuple(result_file.rounded(row[each.name]) for each in fields(Case))


def read(path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the rows of a file by their `key_of`; no rows if there is no such file."""
    return {key_of(row): row for row in result_file.read(path).get("rows", [])}


def save(path: Path, rows: Iterable[dict[str, Any]], resumed_from: str | None = None) -> None:
    """Write rows and what they assume. `resumed_from`: the commit in the file that some of the rows were read from."""
    place = [*SECTIONS, "own"].index
    found = {
        **({} if resumed_from is None else {"resumed_from": resumed_from}),
        "measured_on_a_gpu": "nothing: step times are computed from bytes, FLOP and assumed shares of peaks",
        "device": asdict(H200),
        "assumed": asdict(Assumed()),
        "rows": sorted(rows, key=lambda row: (place(row["section"]), row["trace"], row["replicas"])),
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
    """Print a line per row; write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, "own"], default=["short"])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, help="written after every row; rows that it has are not run again")
    parser.add_argument("--model", choices=list(SERVED), default="gemma-3-27b", help="this and all below: of `own`")
    parser.add_argument("--trace", nargs="+", default=["chat"], help=f"{', '.join(SHAPES)}, or a file (traces.py)")
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--replicas", nargs="+", type=int, default=[8])
    parser.add_argument("--rate", type=float, help="sessions a second and replica")
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--warm", type=float, default=60.0)
    for name in ("seed", "bandwidth", "flops", "cache_threshold", "abs_threshold", "rel_threshold"):
        default = getattr(Case, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    args = parser.parse_args()
    print("No kernel was timed: step times come from bytes, FLOP and assumed shares of peaks.", file=sys.stderr)
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
