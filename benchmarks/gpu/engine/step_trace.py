"""The kernels that a device ran, in their order, by jax's profiler."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax


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
