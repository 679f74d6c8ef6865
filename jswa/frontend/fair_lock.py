"""The lock by which the threads of an `LLM` share its engine: each takes turns of one step."""

import threading
from collections import deque
from types import TracebackType


class FairLock:
    """A lock that threads get in the order in which they ask for it.

    A plain lock would go back to the thread that runs one step after the other; the others would wait for its end.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._held = False
        self._waiting: deque[threading.Lock] = deque()

    @property
    def waiting(self) -> int:
        """Number of threads that wait."""
        return len(self._waiting)

    def take(self) -> bool:
        """Take the lock if nobody has it; never wait, also where the caller interrupts `acquire` in its thread."""
        if not self._mutex.acquire(blocking=False):
            return False
        taken, self._held = not self._held, True
        self._mutex.release()
        return taken

    def acquire(self) -> None:
        """Wait for the lock. It is not reentrant."""
        mine = threading.Lock()
        mine.acquire()
        with self._mutex:
            if not self._held:
                self._held = True
                return
            self._waiting.append(mine)
        try:
            mine.acquire()
        except BaseException:  # KeyboardInterrupt
            with self._mutex:
                given = mine not in self._waiting
                if not given:
                    self._waiting.remove(mine)
            if given:
                self.release()
            raise

    def release(self) -> None:
        """Give the lock to the thread that has waited longest."""
        with self._mutex:
            self._held = bool(self._waiting)
            if self._held:
                self._waiting.popleft().release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
