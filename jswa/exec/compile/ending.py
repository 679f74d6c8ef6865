"""Threads that compile beside the steps: how they begin, and how they end with their engine or with the process."""

import atexit
import logging
import weakref
from threading import Thread
from typing import Protocol, runtime_checkable

_log = logging.getLogger("jswa")


@runtime_checkable
class Compiling(Protocol):
    """What may be compiled in several threads; see `StepPrograms`."""

    def compile_wanted(self) -> None:
        """Compile what is wanted until `end` is called."""
        ...

    def end(self) -> None:
        """Let no thread begin a further program."""
        ...

    def seize(self, seconds: float) -> bool:
        """Wait until no program is being compiled, and let none begin; return False after `seconds`."""
        ...


_engines: weakref.WeakSet[Compiling] = weakref.WeakSet()


def compile_beside(programs: Compiling, owner: object, threads: int = 1) -> None:
    """Compile what plans want, and what follows unasked, in threads, until `programs.end` or the end of `owner`."""

    def run() -> None:
        try:
            programs.compile_wanted()
        except Exception:
            _log.exception("steps stay in the programs that there are, since a smaller one cannot be compiled")

    weakref.finalize(owner, programs.end).atexit = False
    for _ in range(threads):
        Thread(target=run, name="compile beside", daemon=True).start()


def end_at_exit(programs: Compiling) -> None:
    """Have the process wait at its exit for a program that is being compiled, as XLA's threads must not run then."""
    _engines.add(programs)
    # Of what is called at exit, the last one registered comes first. A thread that traces needs jax's caches, which jax
    # forgets then, and the constants of its trace: jax drops each of them in a finalizer. What runs those at exit is
    # registered with the first finalizer of all, so let there be one.
    weakref.finalize(programs, int).atexit = False
    atexit.unregister(end_compiling)
    atexit.register(end_compiling)


def end_compiling(seconds: float = -1.0) -> bool:
    """End all compiling, for the exit of the process; return False if a program takes longer than `seconds` to end.

    -1: wait for as long as it takes.
    """
    for programs in list(_engines):
        programs.end()
        if not programs.seize(seconds):
            return False
        _engines.discard(programs)
    return True
