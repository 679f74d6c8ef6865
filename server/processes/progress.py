"""How far a front end is behind the steps that were sent to it, without a message for each.

The front end adds the steps that it has handled to an eventfd, which wakes nobody. The engine's thread takes the count
when it must know, and sleeps on the eventfd when the front end is too far behind.
"""

import logging
import os
import select
import threading
import time
from collections import deque

_log = logging.getLogger("jswa.server")


class Progress:
    """The steps that were sent to a front end, and that it has not handled.

    Attributes:
        busy: time of `time.monotonic` at which it was last known to have steps to handle.
    """

    def __init__(self, number: int, counter: int, lags: float = 1.0) -> None:
        """Begin with no step.

        Args:
            number: that of the front end, for the log.
            counter: an eventfd that does not block. This object closes it at its `end`.
            lags: seconds for which the engine waits for a front end that does not handle its steps.
        """
        self.busy = 0.0
        self._number = number
        self._counter = counter
        self._times: deque[float] = deque()  # when the steps were sent that it was not known to have handled
        self._ready = select.poll()
        self._ready.register(counter, select.POLLIN)
        self._lock = threading.Lock()
        self._waiting = False  # whether the engine's thread sleeps on the eventfd: nobody else may take its count
        self._longest = lags
        self._lags = self._ended = False

    @property
    def behind(self) -> int:
        """The steps that it had not handled when its count was taken last, and those that were sent since."""
        return len(self._times)

    def sent(self, now: float) -> None:
        """Note that a step is sent."""
        with self._lock:
            if not self._ended:
                self._times.append(now)

    def late(self) -> float:
        """Return the seconds for which its oldest step has waited; 0 if it has handled all."""
        with self._lock:
            now = time.monotonic()
            if self._times and now - self._times[0] > self._longest and not self._waiting and not self._ended:
                self._take(now)
            return now - self._times[0] if self._times else 0.0

    def wait(self, most: int) -> None:
        """Wait, in the engine's thread, until it has `most` steps to handle, but for no front end that lags."""
        while (left := self._left(most)) > 0:
            self._ready.poll(1000 * left)

    def end(self) -> None:
        """Forget all steps, and wait no longer: the front end is lost."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self._times.clear()
            if self._waiting:
                os.eventfd_write(self._counter, 1)  # the thread that wakes closes it
            else:
                os.close(self._counter)

    def _left(self, most: int) -> float:
        """Return the seconds to sleep on the eventfd; 0 to go on."""
        with self._lock:
            if self._ended:
                if self._waiting:
                    os.close(self._counter)
                    self._waiting = False
                return 0.0
            now = time.monotonic()
            self._take(now)
            left = 0.0
            if len(self._times) <= most:
                self._lags = False
            elif not self._lags:
                left = max(0.0, self._times[0] + self._longest - now)
                if not left:
                    self._lags = True
                    _log.warning("front end %d does not keep up; the engine goes on", self._number)
            self._waiting = left > 0
            return left

    def _take(self, now: float) -> None:
        """Take the count."""
        try:
            handled = os.eventfd_read(self._counter)
        except BlockingIOError:
            return
        for _ in range(handled):
            self._times.popleft()
        self.busy = now if self._times else 0.0
