"""Numerics: the cases of all kernels against their oracles, in groups of processes.

    python -m benchmarks.gpu.numerics [--json FILE] [--groups NAME ...] [--without KERNEL ...] [--only EXPRESSION]
                                      [--seconds 160] [--case-seconds 30] [--processes 4] [--every 3 --turn 0]

A case that hangs, dies or poisons the GPU costs its own process only: another one goes on behind it. XLA's autotuner is
off, since it would time every small product of the references. --every takes each third case, say, and --turn says from
which one. The exit status is 1 if a case is wrong; cases for which there was no time are listed as "not run".
"""

import argparse
import importlib.util
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
    """Tests of one kind: a file, an expression that chooses among its tests, and the kernels that they need.

    Attributes:
        marker: of pytest, that the tests must have.
        shards: processes among which its cases are divided: each takes half a minute or so.
        packages: modules that the kernels need and that a machine may lack.
    """

    name: str
    file: str
    choose: str
    kernels: tuple[Kernel, ...]
    shards: int = 1
    packages: tuple[str, ...] = ()
    marker: str = ""


def _attention(name: str, file: str, choose: str, shards: int = 1, kernel: Kernel = "attention") -> Group:
    return Group(name, f"{_ROOM}/attention/{file}.py", choose, (kernel,), shards)


def _experts(name: str, file: str, choose: str, shards: int = 1, *kernels: Kernel) -> Group:
    return Group(name, f"{_ROOM}/experts/{file}.py", choose, kernels or ("mxfp4",), shards)


def _triton(name: str, file: str, shards: int = 1) -> Group:
    choose = "not test_the_interpreter"
    return Group(name, f"{_ROOM}/{file}.py", choose, ("triton",), shards, ("jax_triton",), "triton")


_OVERLAP = "test_all_tunings or test_all_tilings or give_the_same_bits or gives_the_same_bits"
GROUPS = (
    _attention("matrix", "test_hopper", "test_matrix", 4),
    _attention("attention", "test_paged_attention", "mosaic and not fp8", 6),
    _attention("8-bit pages", "test_paged_attention", "mosaic and fp8", 1, "fp8"),
    _attention("tunings of attention", "test_hopper", "test_all_tunings or test_a_row_of or test_queries_beyond", 2),
    _attention("splits", "test_splits", "test_all_tunings or bits_are_its_own", 2),
    _attention("whole rows", "test_whole", "test_a_query_has or test_other_kernels"),
    _experts("experts", "test_grouped_matmul", f"mosaic and not (4 and bits) and not {_NARROW}", 1, "experts"),
    _experts("4 bits", "test_grouped_matmul", "mosaic and 4 and bits and not overlap"),
    _experts("4 bits, overlap", "test_grouped_matmul", "mosaic_overlap and bits"),
    _experts("8 bits, int4", "test_grouped_matmul", f"mosaic and {_NARROW}", 2),
    _experts("linear layers", "test_dense", "test_tokens_are_multiplied or test_nan_in or are_found", 2),
    _experts("tunings of overlap", "test_overlap", _OVERLAP, 5),
    _experts("tunings of experts", "test_hopper", "test_all_t or test_a_thread_block", 3, "experts", "mxfp4"),
    Group(
        "elementwise",
        f"{_ROOM}/elementwise/test_elementwise.py",
        "(mosaic or pages_of_8) and not refused",
        ("attention",),
        3,
    ),
    _triton("attention on Triton", "attention/test_triton", 5),
    _triton("whole rows on Triton", "attention/test_whole"),
    _triton("experts on Triton", "experts/test_triton", 2),
    _triton("routing", "experts/test_routing", 2),
    _triton("sums", "elementwise/test_row_sums"),
    _triton("sampling", "sampling/test_sampling"),
    Group("float32 in XLA", f"{_ROOM}/attention/test_paged_attention.py", "xla and (p128 or p200 or 1000)", ()),
)


def check(groups: Sequence[Group], log: Path, until: float, args: argparse.Namespace) -> list[tuple[Group, Verdict]]:
    """Run groups, each cut into its shards, by a few processes at a time; return all verdicts, the worst first."""
    processes: int = args.processes
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
    environ = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": flags}

    def shard(group: Group, index: int) -> list[tuple[Group, Verdict]]:
        choose = f"({group.choose}) and ({args.only})" if args.only else group.choose
        own = log.with_name(f"{log.stem}-{group.name.replace(' ', '_')}-{index}.log")
        part = f"{index * args.every + args.turn}/{group.shards * args.every}"
        select = (group.file, "-k", choose, "-m", group.marker)
        cases = Cases(select, args.case_seconds, part, args.start_seconds)
        verdicts = run_cases(cases, own, until=until, environ=environ)
        return [(group, verdict) for verdict in verdicts]

    work = [(group, index) for group in groups for index in range(group.shards)]
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
    parser.add_argument("--every", type=int, default=1, help="take one case of so many")
    parser.add_argument("--turn", type=int, default=0, help="the first case that is taken, with --every")
    parser.add_argument("--json", type=Path, help="result file to write")
    args = parser.parse_args(words)
    there = [group for group in GROUPS if all(map(importlib.util.find_spec, group.packages))]
    groups = [g for g in there if g.name in args.groups and not set(g.kernels) & set(args.without)]
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
