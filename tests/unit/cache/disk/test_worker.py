"""A thread that reads and writes files (jswa/cache/disk/worker.py): its results come to the thread that asks."""

import threading

from jswa.cache.disk.worker import DiskWorker


def test_results_are_waited_for_as_long_as_asked_and_only_if_any_are_to_come() -> None:
    worker, seen, may = DiskWorker("test"), list[object](), threading.Event()
    worker.submit(lambda: may.wait(60), seen.append)
    worker.settle()
    worker.settle(0.01)
    assert (seen, worker.left) == ([], 1)
    later = threading.Timer(0.2, may.set)
    later.start()
    worker.settle(60.0)
    assert (seen, worker.left) == ([True], 0)
    worker.settle(float("inf"))  # nothing is to come
    worker.close()


def test_an_error_is_a_result() -> None:
    """Those after it are handled in their order."""
    worker, seen = DiskWorker("test"), list[object]()
    worker.submit(lambda: 1 // 0, seen.append)
    worker.submit(lambda: 2, seen.append)
    while worker.left:
        worker.settle(60.0)
    assert isinstance(seen[0], ZeroDivisionError)
    assert seen[1:] == [2]
    worker.close()
