"""Numerics: the cases of all kernels against their oracles, in groups of processes.

    python -m benchmarks.gpu.numerics [--json FILE] [--groups NAME ...] [--without KERNEL ...] [--only EXPRESSION]
                                      [--seconds 160] [--case-seconds 30] [--processes 4]

A case that hangs, dies or poisons the GPU costs its own process only: another one goes on behind it. XLA's autotuner is
off, since it would time every small product of the references. The exit status is 1 if a case is wrong; cases for
which there was no time are listed as "not run".
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from benchmarks import result_file
from benchmarks.gpu.supervise import BAD, Cases, Verdict, as_rows, run_cases
from tools.cases.kernels.ladder import Kernel

_ROOM = "tests/unit/pallas_kernels"
_NARROW = "(int8 or fp8 or int4)"


@dataclass(frozen=True)
class Group:
    """Tests of one kind: a file, an expression that chooses among its tests, and the kernels that they need."""

    name: str
    file: str
    choose: str
    kernels: tuple[Kernel, ...]


GROUPS = (
    Group("attention", f"{_ROOM}/attention/test_paged_attention.py", "mosaic and not fp8", ("attention",)),
    Group(
        "experts",
        f"{_ROOM}/experts/test_grouped_matmul.py",
        f"mosaic and not (4 and bits) and not {_NARROW}",
        ("experts",),
    ),
    Group("4 bits", f"{_ROOM}/experts/test_grouped_matmul.py", "mosaic and 4 and bits and not overlap", ("mxfp4",)),
    Group("4 bits, overlap", f"{_ROOM}/experts/test_grouped_matmul.py", "mosaic_overlap and bits", ("mxfp4",)),
    Group("8 bits, int4", f"{_ROOM}/experts/test_grouped_matmul.py", f"mosaic and {_NARROW}", ("mxfp4",)),
    Group("linear layers", f"{_ROOM}/experts/test_dense.py", "test_tokens_are_multiplied", ("mxfp4",)),
    Group("tunings of overlap", f"{_ROOM}/experts/test_overlap.py", "test_all_tunings", ("mxfp4",)),
    Group("8-bit pages", f"{_ROOM}/attention/test_paged_attention.py", "mosaic and fp8", ("fp8",)),
    Group("matrix", f"{_ROOM}/attention/test_hopper.py", "test_matrix", ("attention",)),
    Group("tunings of attention", f"{_ROOM}/attention/test_hopper.py", "test_all_tunings", ("attention",)),
    Group(
        "tunings of experts",
        f"{_ROOM}/experts/test_hopper.py",
        "test_all_tunings or test_a_thread_block",
        ("experts", "mxfp4"),
    ),
    Group("float32 in XLA", f"{_ROOM}/attention/test_paged_attention.py", "xla and (p128 or p200 or 1000)", ()),
)


def check(groups: Sequence[Group], log: Path, until: float, args: argparse.Namespace) -> list[tuple[Group, Verdict]]:
    """Run groups, each cut into as many shards as there are processes; return all verdicts, the worst first."""
    processes: int = args.processes
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
    environ = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": flags}

    def shard(group: Group, index: int) -> list[tuple[Group, Verdict]]:
        choose = f"({group.choose}) and ({args.only})" if args.only else group.choose
        own = log.with_name(f"{log.stem}-{group.name.replace(' ', '_')}-{index}.log")
        cases = Cases((group.file, "-k", choose), args.case_seconds, f"{index}/{processes}", args.start_seconds)
        verdicts = run_cases(cases, own, until=until, environ=environ)
        return [(group, verdict) for verdict in verdicts]

    work = [(group, index) for group in groups for index in range(processes)]
    with ThreadPoolExecutor(processes) as pool:
        found = [one for part in pool.map(lambda each: shard(*each), work) for one in part]
    order = {outcome: rank for rank, outcome in enumerate((*BAD, "not run", "passed", "skipped"))}
    return sorted(found, key=lambda one: order[one[1].outcome])


def main(words: Sequence[str] | None = None) -> int:
    """Check and print; write JSON if it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [group.name for group in GROUPS]
    parser.add_argument("--groups", nargs="+", default=names, choices=names, help="groups to run")
    parser.add_argument("--without", nargs="*", default=[], choices=get_args(Kernel), help="kernels that are broken")
    parser.add_argument("--only", default="", help="expression of pytest's -k that cases must match too")
    parser.add_argument("--seconds", type=float, default=160, help="after which everything has ended")
    parser.add_argument("--case-seconds", type=float, default=30, help="after which a case is hung")
    parser.add_argument("--start-seconds", type=float, default=60, help="in which a process must begin its first case")
    parser.add_argument("--processes", type=int, default=4, help="at a time")
    parser.add_argument("--json", type=Path, help="result file to write")
    args = parser.parse_args(words)
    groups = [g for g in GROUPS if g.name in args.groups and not set(g.kernels) & set(args.without)]
    log = (args.json or Path("numerics.json")).with_suffix(".cases.log")
    checked = check(groups, log, time.monotonic() + args.seconds, args)
    for group, verdict in checked:
        if verdict.outcome in BAD:
            print(f"WRONG {', '.join(group.kernels)}: {verdict.case}: {verdict.outcome} {verdict.why}")
    counts = Counter(verdict.outcome for _, verdict in checked)
    print(f"{len(checked)} cases: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}")
    if args.json:
        rows = [
            row for group, verdict in checked for row in as_rows([verdict], group=group.name, kernels=group.kernels)
        ]
        result_file.write(args.json, {"counts": dict(counts), "without": args.without, "cases": rows})
    return 1 if any(verdict.outcome in BAD for _, verdict in checked) else 0


if __name__ == "__main__":
    sys.exit(main())
