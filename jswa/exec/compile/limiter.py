"""Limits what threads compile: each program once, so many at a time, and first those that someone waits for."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from threading import Condition, Thread

import jax

_MOST = 8  # programs at a time: each takes hundreds of megabytes, and their tracing goes one by one


class CompileLimiter:
    """Permits threads to compile programs.

    Args:
        together: how many programs are compiled at a time, at most.
    """

    def __init__(self, together: int) -> None:
        self._together = together
        self._changed = Condition()
        self._under_way: set[int] = set()
        self._waiting = 0  # threads for which someone waits: no other begins a program meanwhile
        self._seized = False

    @contextmanager
    def urgent(self) -> Iterator[None]:
        """Mark what is compiled inside, with urgent permits, as what someone waits for."""
        with self._changed:
            self._waiting += 1
        try:
            yield
        finally:
            with self._changed:
                self._waiting -= 1
                self._changed.notify_all()

    @contextmanager
    def permit(self, number: int, is_compiled: Callable[[], bool], *, urgent: bool = False) -> Iterator[bool]:
        """Wait until a program may be compiled; yield whether it is not compiled yet, and so must be now.

        An urgent permit is taken inside of `urgent`, and waits for no other thread that is.
        """
        with self._changed:
            self._changed.wait_for(lambda: is_compiled() or self._may_begin(number, urgent=urgent))
            begins = not is_compiled()
            if begins:
                self._under_way.add(number)
        try:
            yield begins
        finally:
            if begins:
                with self._changed:
                    self._under_way.discard(number)
                    self._changed.notify_all()

    def _may_begin(self, number: int, *, urgent: bool) -> bool:
        free = number not in self._under_way and len(self._under_way) < self._together
        return free and not self._seized and (urgent or not self._waiting)

    def seize(self, seconds: float) -> bool:
        """Wait until no program is being compiled, and let none begin; return False after `seconds` (-1: no limit)."""
        with self._changed:
            idle = self._changed.wait_for(lambda: not self._under_way, None if seconds < 0 else seconds)
            self._seized = self._seized or idle
            return idle


def together() -> int:
    """Return how many programs to compile at a time. A CPU has one thread for each step beside them: one."""
    return 1 if jax.default_backend() == "cpu" else min(_MOST, os.cpu_count() or 1)


def side_by_side(numbers: Sequence[int], run: Callable[[int], None], threads: int) -> None:
    """Call a function with each number, in so many threads, of which the calling one is one; it gets the first error.

    They are no pool of Python's: at the exit of the process that would run all that is left.
    """
    rest, failed = iter(numbers), Future[None]()

    def work() -> None:
        try:
            for number in rest:
                run(number)
                if failed.done():
                    return
        except BaseException as error:
            with suppress(InvalidStateError):  # another thread has failed before
                failed.set_exception(error)

    helpers = [Thread(target=work, name="compile", daemon=True) for _ in range(min(threads, len(numbers)) - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    if failed.done():
        failed.result()
