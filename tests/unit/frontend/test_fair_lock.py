"""The lock by which threads share an engine."""

import threading
from collections.abc import Callable

import pytest

from jswa.frontend.fair_lock import FairLock


def started(function: Callable[[], None]) -> threading.Thread:
    """Run a function in a thread."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_threads_get_the_lock_in_the_order_in_which_they_ask() -> None:
    """A thread that asks again at once comes after those that wait: a plain lock would go back to it."""
    lock, order = FairLock(), []
    ready = [threading.Event() for _ in range(3)]

    def work(number: int) -> None:
        for _ in range(3):
            ready[number].set()
            with lock:
                order.append(number)

    lock.acquire()
    threads = []
    for number in range(3):
        threads.append(started(lambda number=number: work(number)))  # type: ignore[misc]
        ready[number].wait(10)
        while lock.waiting <= number:
            pass
    lock.release()
    for thread in threads:
        thread.join(10)
    assert order[:3] == [0, 1, 2]
    assert len(order) == 9


def test_take_never_waits() -> None:
    """It fails while another thread, or the same one, has the lock."""
    lock = FairLock()
    assert lock.take()
    assert not lock.take()
    lock.release()
    with lock:
        assert not lock.take()
    assert lock.take()


def test_an_interrupted_wait_gives_the_lock_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the interrupt comes before or after the lock was given to the thread that waits."""
    lock = FairLock()

    class Interrupted:
        """A lock whose second `acquire`, the wait, is interrupted; `late`: once the lock was given."""

        def __init__(self, *, late: bool) -> None:
            self.late, self.calls = late, 0

        def acquire(self) -> None:
            self.calls += 1
            if self.calls == 2:
                if self.late:
                    lock.release()
                raise KeyboardInterrupt

        def release(self) -> None:
            pass

    for late in (False, True):
        lock.acquire()
        with monkeypatch.context() as patch:
            patch.setattr(threading, "Lock", lambda late=late: Interrupted(late=late))
            with pytest.raises(KeyboardInterrupt):
                lock.acquire()
        if not late:
            lock.release()
        assert lock.take(), "the lock is lost"
        lock.release()
