"""A thread that reads or writes files for the engine's thread, which never waits for it."""

import queue
import threading
from collections.abc import Callable


class DiskWorker:
    """A daemon thread that runs functions in order. The caller's thread handles their results (`settle`).

    Attributes:
        left: number of functions whose results have not been handled.
    """

    def __init__(self, name: str) -> None:
        self.left = 0
        self._todo: queue.SimpleQueue[Callable[[], Callable[[], None]] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit[T](self, work: Callable[[], T], then: Callable[[T | Exception], None]) -> None:
        """Have the thread run `work`; `settle` calls `then` with its result or its exception."""

        def run() -> Callable[[], None]:
            try:
                result: T | Exception = work()
            except Exception as error:  # whatever a file system raises
                result = error
            return lambda: then(result)

        self.left += 1
        self._todo.put(run)

    def settle(self, seconds: float = 0.0) -> None:
        """Handle the results that are there; wait so long for the first, if any are to come."""
        while self.left:
            try:
                handle = self._done.get(timeout=seconds) if seconds > 0 else self._done.get_nowait()
            except queue.Empty:
                return
            seconds = 0.0
            self.left -= 1
            handle()

    def close(self) -> None:
        """End the thread after the functions that wait."""
        self._todo.put(None)

    def _run(self) -> None:
        while (work := self._todo.get()) is not None:
            self._done.put(work())
