"""The kernels that a device ran, in their order, by jax's profiler.

    python -m benchmarks.gpu.engine.step_trace FILE [--most 25] [--gaps 5]

prints a file that `benchmarks.gpu.engine.decode_steps --trace` has written: for each size of a step its kernels by
their time, then, with --gaps, how often and how long the device waits more than so many microseconds before a kernel.
While it traces, the host may launch steps too late: gaps of hundreds of microseconds are of the trace.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks import result_file

_WIDTH = 60  # letters of a name that are printed


class Kernel(NamedTuple):
    """A kernel: its name, the nanosecond in which it began, counted from the first one, and how many it took."""

    name: str
    begin: int
    duration: int


def traced(run: Callable[[], object]) -> list[Kernel]:
    """Return the kernels that the first GPU ran during a call, which must wait for them; none if there is no GPU."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        found = [kernel for file in files for kernel in _kernels(jax.profiler.ProfileData.from_file(str(file)))]
    found.sort(key=lambda kernel: kernel.begin)
    first = found[0].begin if found else 0
    return [kernel._replace(begin=kernel.begin - first) for kernel in found]


def _kernels(data: jax.profiler.ProfileData) -> list[Kernel]:
    return [
        Kernel(event.name, int(event.start_ns), int(event.duration_ns))
        for plane in data.planes
        if plane.name == "/device:GPU:0"
        for line in plane.lines
        if line.name.startswith("Stream")  # other lines group the same kernels by program and operation
        for event in line.events
    ]


def kernels_of(trace: Mapping[str, Any]) -> list[Kernel]:
    """Return the kernels of a trace in a file."""
    return [Kernel(trace["names"][name], begin, duration) for name, begin, duration in trace["kernels"]]


def by_time(trace: Mapping[str, Any], most: int) -> Iterator[str]:
    """Yield lines of Markdown: the kernels that take most of a step."""
    steps, names = trace["steps"], dict[str, list[int]]()
    for kernel in kernels_of(trace):
        names.setdefault(kernel.name, []).append(kernel.duration)
    total = sum(map(sum, names.values())) / steps
    yield f"{trace['rows']} rows of {trace['context']:,} tokens: {total / 1e6:.3f} ms of kernels in a step"
    yield from ("", "| kernel | in a step | µs each, median | µs of a step |", "| --- | ---: | ---: | ---: |")
    for name, found in sorted(names.items(), key=lambda each: -sum(each[1]))[:most]:
        each, own = statistics.median(found) / 1e3, sum(found) / steps / 1e3
        yield f"| {name[:_WIDTH]} | {len(found) / steps:g} | {each:.2f} | {own:.1f} |"


def gaps(trace: Mapping[str, Any], least: float) -> Iterator[str]:
    """Yield a line for each kernel before which the device waits more than `least` microseconds."""
    found, end = dict[str, list[float]](), 0
    for before, kernel in pairwise(kernels_of(trace)):
        end = max(end, before.begin + before.duration)
        if (gap := (kernel.begin - end) / 1e3) > least:
            found.setdefault(f"{before.name} → {kernel.name}", []).append(gap)
    for name, waits in found.items():
        yield f"{len(waits)} times {statistics.median(waits):.0f} µs: {name}"


def main(words: Sequence[str] | None = None) -> None:
    """Print the tables of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="traces of steps")
    parser.add_argument("--most", type=int, default=25, help="kernels of a size")
    parser.add_argument("--gaps", type=float, help="microseconds from which a gap is printed")
    args = parser.parse_args(words)
    for trace in result_file.read(args.file)["traces"]:
        print("\n".join(by_time(trace, args.most)))
        if args.gaps is not None:
            print("\n".join(["", *gaps(trace, args.gaps)]))
        print()


if __name__ == "__main__":
    main()
