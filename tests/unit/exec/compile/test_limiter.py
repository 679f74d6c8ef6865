"""Threads that compile: each program once, so many at a time, first those that someone waits for, none at the end."""

import threading
import time
from collections.abc import Callable
from functools import partial
from threading import Event, Thread

import pytest

from jswa.exec.compile.limiter import CompileLimiter, side_by_side


def begun(run: Callable[[], None]) -> Thread:
    thread = Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_programs_are_compiled_once_and_so_many_at_a_time() -> None:
    """Twelve threads want six programs, of which three are compiled at a time at most."""
    limiter, compiled, at_once, most = CompileLimiter(3), list[int](), 0, 0
    lock = threading.Lock()

    def compile_all(first: int) -> None:
        nonlocal at_once, most
        for number in [(first + place) % 6 for place in range(6)]:
            with limiter.permit(number, partial(compiled.__contains__, number)) as begins:
                if not begins:
                    continue
                with lock:
                    at_once += 1
                    most = max(most, at_once)
                time.sleep(0.02)
                with lock:
                    at_once -= 1
                compiled.append(number)

    threads = [begun(partial(compile_all, first)) for first in range(12)]
    for thread in threads:
        thread.join(30)
    assert sorted(compiled) == list(range(6))
    assert 1 < most <= 3


def test_what_someone_waits_for_goes_first() -> None:
    """A thread that compiled for no one begins no program until all that are waited for are compiled."""
    limiter, order, held, under_way = CompileLimiter(1), list[str](), Event(), Event()

    def compile_one(number: int, name: str, *, urgent: bool) -> None:
        with limiter.permit(number, lambda: False, urgent=urgent):
            under_way.set()
            held.wait(30)
            order.append(name)

    first = begun(lambda: compile_one(0, "under way", urgent=False))
    assert under_way.wait(30)
    others = [begun(partial(compile_one, number, "later", urgent=False)) for number in (1, 2)]

    def wait_for_two() -> None:
        for number in (3, 4):
            compile_one(number, "waited for", urgent=True)

    with limiter.urgent():
        waited = begun(wait_for_two)
        held.set()
        for thread in (first, waited):
            thread.join(30)
        assert order == ["under way", "waited for", "waited for"]
    for thread in others:
        thread.join(30)
    assert order[3:] == ["later", "later"]


def test_an_error_ends_a_turn() -> None:
    limiter = CompileLimiter(1)
    with pytest.raises(ZeroDivisionError), limiter.permit(0, lambda: False):
        raise ZeroDivisionError
    with limiter.permit(0, lambda: False) as begins:
        assert begins


def test_seized_turns_are_over() -> None:
    """Only once the program that is being compiled is there; what was compiled is still found."""
    limiter, held, under_way, ended = CompileLimiter(2), Event(), Event(), Event()

    def compile_one(number: int) -> None:
        with limiter.permit(number, lambda: False):
            under_way.set()
            held.wait(30)
        ended.set()

    begun(lambda: compile_one(0))
    assert under_way.wait(30)
    assert not limiter.seize(0.05)
    held.set()
    assert ended.wait(30)
    assert limiter.seize(-1.0)
    assert limiter.seize(0.0)
    ended.clear()
    begun(lambda: compile_one(1))
    assert not ended.wait(0.2)
    with limiter.permit(0, lambda: True) as begins:
        assert not begins


def test_threads_share_the_work_and_the_caller_gets_the_error() -> None:
    done, barrier = list[int](), threading.Barrier(3, timeout=30)

    def run(number: int) -> None:
        if number < 3:
            barrier.wait()  # three threads are there at once
        done.append(number)

    side_by_side(range(10), run, 3)
    assert sorted(done) == list(range(10))
    side_by_side((), run, 3)

    def fail(number: int) -> None:
        done.append(number)
        if number == 1:
            raise ValueError("the second")

    done.clear()
    with pytest.raises(ValueError, match="the second"):
        side_by_side(range(10), fail, 1)
    assert done == [0, 1]
