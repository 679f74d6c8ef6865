"""A start, told while it happens: a log line for each stage, and a bar on a terminal while the stage runs.

The lines are those of the logger `jswa.start`, at INFO. `jswa serve` shows them among all others; the other commands
show only them.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Timer

from tqdm import tqdm

LOG = logging.getLogger("jswa.start")
SOON = 1.0  # seconds after which a stage that still runs says so
_bars: ContextVar[bool] = ContextVar("bars", default=True)


@contextmanager
def bars(*, shown: bool) -> Iterator[None]:
    """Show the bars of the stages inside if stderr is a terminal; or show none of them."""
    before = _bars.set(shown)
    try:
        yield
    finally:
        _bars.reset(before)


@contextmanager
def stage(name: str, total: int, size: str, *, slow: str = "", unit: str = "") -> Iterator[Callable[[int], object]]:
    """Yield a function that counts what is done; log the size and the seconds of the stage once it has ended.

    Args:
        name: of the stage, such as "weights".
        total: how much there is to do.
        size: says the total in words, such as "1.50 GiB".
        slow: is logged too if the stage takes longer than `SOON`: what is going on, or why it will be faster later.
        unit: "B" if the total is in bytes.
    """
    begin, scaled = time.perf_counter(), unit == "B"
    hint = Timer(SOON, LOG.info, (f"{name}: {slow or size}",))
    hint.daemon = True
    hidden = None if _bars.get() else True  # None: tqdm hides the bar where stderr is no terminal
    with tqdm(
        total=total, desc=name, unit=unit, unit_scale=scaled, unit_divisor=1024, leave=False, disable=hidden
    ) as bar:
        hint.start()
        try:
            yield bar.update
        finally:
            hint.cancel()
    LOG.info("%s: %s in %.1f s", name, size, time.perf_counter() - begin)
