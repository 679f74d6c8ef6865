"""How far front ends are behind (server/processes/progress.py), and steps that are sent together (hub.py)."""

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from server.processes.progress import Progress


@pytest.fixture
def counter() -> Iterator[int]:
    """The front end's end of an eventfd, whose other end is the progress's."""
    ours = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    yield ours
    os.close(ours)


def _of(counter: int, steps: int, lags: float = 1.0) -> Progress:
    found = Progress(1, os.dup(counter), lags)
    for _ in range(steps):
        found.sent(time.monotonic())
    return found


def _after(seconds: float, work: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, work)
    timer.start()
    return timer


def _seconds(one: Progress, most: int) -> float:
    begin = time.monotonic()
    one.wait(most)
    return time.monotonic() - begin


def test_the_count_is_taken_when_it_is_needed(counter: int) -> None:
    one = _of(counter, 5)
    os.eventfd_write(counter, 2)
    os.eventfd_write(counter, 1)
    assert one.behind == 5, "nobody has asked"
    assert _seconds(one, 2) < 0.5
    assert one.behind == 2
    assert one.busy > 0
    os.eventfd_write(counter, 2)
    one.wait(0)
    assert (one.behind, one.busy) == (0, 0.0)
    one.end()


def test_the_engine_waits_until_enough_steps_are_handled(counter: int) -> None:
    one = _of(counter, 4)
    timers = [_after(0.1, lambda: os.eventfd_write(counter, 1)), _after(0.2, lambda: os.eventfd_write(counter, 2))]
    assert 0.15 < _seconds(one, 1) < 0.9
    assert one.behind == 1
    for timer in timers:
        timer.join()
    one.end()


def test_nobody_waits_for_a_front_end_that_lags_until_it_has_caught_up(
    counter: int, caplog: pytest.LogCaptureFixture
) -> None:
    one = _of(counter, 3, lags=0.1)
    assert 0.05 < _seconds(one, 1) < 5
    begin = time.monotonic()
    for _ in range(50):
        one.sent(time.monotonic())
        os.eventfd_write(counter, 1)
        one.wait(1)
    assert time.monotonic() - begin < 2.5, "it lags"
    assert "front end 1 does not keep up" in caplog.text
    assert len(caplog.records) == 1
    os.eventfd_write(counter, one.behind - 1)
    one.wait(1)
    one.sent(time.monotonic())
    assert _seconds(one, 1) > 0.05, "it has caught up"
    one.end()


def test_how_late_it_is(counter: int) -> None:
    one = _of(counter, 2, lags=0.05)
    time.sleep(0.1)
    assert 0.1 <= one.late() < 5
    os.eventfd_write(counter, 2)
    assert one.late() == 0
    one.end()


def test_a_front_end_that_is_lost_holds_up_nobody(counter: int) -> None:
    files = len(os.listdir("/proc/self/fd"))
    one = _of(counter, 3)
    timer = _after(0.1, one.end)
    assert 0.05 < _seconds(one, 0) < 0.95
    timer.join()
    one.sent(time.monotonic())
    assert one.behind == 0
    assert one.late() == 0
    one.wait(0)
    one.end()
    assert len(os.listdir("/proc/self/fd")) == files, "the thread that waited has closed its end"
    two = _of(counter, 1)
    two.end()
    assert len(os.listdir("/proc/self/fd")) == files
