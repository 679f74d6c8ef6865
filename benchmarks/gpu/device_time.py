"""Time on the device, without what the host takes to launch."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

_WORTH_SECONDS = 400e-6  # of work between the two programs that are compared


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: median, least and most of several runs."""

    median: float
    least: float
    most: float


def time_calls(call: Callable[..., Any], arguments: Sequence[Sequence[Any]], repeats: int = 7) -> Timing:
    """Time of one call, from programs that make few and many: the difference holds no launch and no waiting.

    Args:
        call: of which each program makes one per entry, as different kernels on one stream.
        arguments: of the calls; the first third of them makes the small program. They must differ in some array, or
            the compiler makes one call of equal ones, and they should not fit into the cache together.
    """
    few, many = len(arguments) // 3 or 1, len(arguments)
    if many < 2:
        raise ValueError("time_calls needs arguments of at least two calls")
    programs = [(count, jax.jit(lambda *each: [call(*a) for a in each])) for count in (few, many)]
    for count, program in programs:
        for _ in range(3):  # the first run compiles, the second captures a graph
            jax.block_until_ready(program(*arguments[:count]))  # type: ignore[no-untyped-call]
    seconds: list[float] = []
    for _ in range(repeats):
        taken = [_run(program, arguments[:count]) for count, program in programs]
        seconds.append((taken[1] - taken[0]) / (many - few))
    return Timing(statistics.median(seconds), min(seconds), max(seconds))


def calls_worth_timing(seconds: float, most: int = 48) -> int:
    """How many calls of about so many seconds `time_calls` should be given: a multiple of three."""
    return 3 * max(1, min(most // 3, int(_WORTH_SECONDS / (2 * seconds)) + 1))


def _run(program: Callable[..., Any], arguments: Sequence[Sequence[Any]]) -> float:
    """The better of a few runs: the host disturbs in one direction only."""
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(program(*arguments))  # type: ignore[no-untyped-call]
        best = min(best, time.perf_counter() - start)
    return best
