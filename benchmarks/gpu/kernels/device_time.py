"""Device time of a call, without the time that the host takes to launch it."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

_WORTH_SECONDS = 400e-6  # by which the two compared programs should differ


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: median, minimum and maximum of several runs."""

    median: float
    least: float
    most: float


def time_calls(call: Callable[..., Any], arguments: Sequence[Sequence[Any]], repeats: int = 7) -> Timing:
    """Time one call as the difference between programs of few and of many calls, which excludes launch and waiting.

    Args:
        call: the function to time; a program calls it once per entry of `arguments`, on one stream.
        arguments: of each call; the small program has the first third of them. They must differ in some array, or the
            compiler merges equal calls, and they should not fit into the cache together.

    Raises ValueError if there are fewer than two calls.
    """
    return time_programs(programs_of(call, len(arguments)), arguments, repeats)


def programs_of(call: Callable[..., Any], many: int) -> list[tuple[int, Callable[..., Any]]]:
    """Return programs of few and of `many` calls, to be timed with several arguments; see `time_calls`."""
    if many < 2:
        raise ValueError("time_calls needs arguments of at least two calls")
    return [(count, jax.jit(lambda *each: [call(*a) for a in each])) for count in (many // 3 or 1, many)]


def time_programs(
    programs: Sequence[tuple[int, Callable[..., Any]]], arguments: Sequence[Sequence[Any]], repeats: int = 7
) -> Timing:
    """Time one call with these arguments, by the programs of `programs_of`; see `time_calls`."""
    (few, _), (many, _) = programs
    for count, program in programs:
        for _ in range(3):  # the first run compiles, the second captures a graph
            jax.block_until_ready(program(*arguments[:count]))  # type: ignore[no-untyped-call]
    seconds: list[float] = []
    for _ in range(repeats):
        taken = [_run(program, arguments[:count]) for count, program in programs]
        seconds.append((taken[1] - taken[0]) / (many - few))
    return Timing(statistics.median(seconds), min(seconds), max(seconds))


def calls_worth_timing(seconds: float, most: int = 48) -> int:
    """Return how many calls of about `seconds` each to pass to `time_calls`: a multiple of three."""
    return 3 * max(1, min(most // 3, int(_WORTH_SECONDS / (2 * seconds)) + 1))


def _run(program: Callable[..., Any], arguments: Sequence[Sequence[Any]]) -> float:
    """Return the shortest of three runs: the host can only make them longer."""
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(program(*arguments))  # type: ignore[no-untyped-call]
        best = min(best, time.perf_counter() - start)
    return best
