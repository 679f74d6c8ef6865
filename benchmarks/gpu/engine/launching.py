"""The host's microseconds to launch a program, by its parts, and what XLA's host threads do meanwhile."""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

COUNT = 24  # launches: fewer than the 32 that PJRT's GPU client lets wait
_PARTS = ("put", "call", "fetch")
Times = list[tuple[float, ...]]


class Launches:
    """A program that is launched again and again.

    Args:
        packed: returns the next plan, in host memory.
        run: runs the program with a plan; returns a small array that the host wants.
    """

    def __init__(self, packed: Callable[[], Any], run: Callable[[Any], jax.Array]) -> None:
        self._packed, self._run = packed, run

    def one(self, packed: Any, times: Times, *, put: bool = True) -> jax.Array:
        """Launch once. `put`: upload the plan first, and do not hand it to the program as it is."""
        start = time.perf_counter()
        placed = jax.device_put(packed) if put else packed
        after = time.perf_counter()
        result = self._run(placed)
        called = time.perf_counter()
        result.copy_to_host_async()
        times.append((after - start, called - after, time.perf_counter() - called))
        return result

    def queued(self, *, put: bool = True) -> dict[str, float]:
        """Launch without waiting; `step` begins with the first result."""
        packed, times = [self._packed() for _ in range(COUNT)], Times()
        start = time.perf_counter()
        results = [self.one(each, times, put=put) for each in packed]
        launched = time.perf_counter() - start
        np.asarray(results[0])
        begun = time.perf_counter()
        np.asarray(results[-1])
        step = (time.perf_counter() - begun) / (COUNT - 1)
        return {**parts(times), "launch": 1e6 * launched / COUNT, "step": 1e6 * step}

    def in_turn(self) -> dict[str, float]:
        """Launch each before the result of the last is fetched, as an engine does."""
        packed, times = [self._packed() for _ in range(COUNT)], Times()
        last = self.one(packed[0], times)
        start = time.perf_counter()
        for each in packed[1:]:
            result = self.one(each, times)
            np.asarray(last)
            last = result
        np.asarray(last)
        return {**parts(times), "step": 1e6 * (time.perf_counter() - start) / (COUNT - 1)}

    def idle(self) -> dict[str, float]:
        """Launch each after the device has ended; `step` is the time to the result."""
        times, whole = Times(), []
        for packed in [self._packed() for _ in range(COUNT // 2)]:
            time.sleep(0.001)
            start = time.perf_counter()
            np.asarray(self.one(packed, times))
            whole.append(time.perf_counter() - start)
        return {**parts(times), "step": 1e6 * statistics.median(whole)}

    def all(self, *, numpy: bool = True) -> dict[str, Any]:
        """Warm up, then launch in all ways. `numpy`: also with plans that are not uploaded before."""
        begin, unused = time.perf_counter(), Times()
        np.asarray(self.one(self._packed(), unused))
        first = time.perf_counter() - begin
        for _ in range(6):
            np.asarray(self.one(self._packed(), unused))
        found: dict[str, Any] = {"first_seconds": first, "queued": self.queued(), "in turn": self.in_turn()}
        found |= {"idle": self.idle(), "again": self.queued()}
        if numpy:
            found["numpy"] = self.queued(put=False)
        return found


def parts(times: Sequence[tuple[float, ...]]) -> dict[str, float]:
    """Return medians in microseconds."""
    columns = zip(*times, strict=True)
    return {name: 1e6 * statistics.median(each) for name, each in zip(_PARTS, columns, strict=True)}


def on_host(run: Callable[[], None], most: int = 60) -> list[dict[str, Any]]:
    """Return what XLA's host threads did during a call: how often, and µs in all, with what lies inside."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 3
    spent: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        for file in Path(folder).rglob("*.xplane.pb"):
            planes = jax.profiler.ProfileData.from_file(str(file)).planes
            threads = [line for plane in planes if plane.name.startswith("/host:") for line in plane.lines]
            for name, event in ((thread.name, event) for thread in threads for event in thread.events):
                spent.setdefault(f"{name}: {event.name}"[:120], []).append(event.duration_ns / 1e3)
    largest = sorted(spent.items(), key=lambda each: -sum(each[1]))[:most]
    return [{"event": name, "count": len(us), "us": sum(us), "median": statistics.median(us)} for name, us in largest]
