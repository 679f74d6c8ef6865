"""A server for the test of /live: an arena of 200,000 slots, 1,400 rows whose windows slide, ten changes a second.

`python -m tests.pages.load_server` is the process.
"""

import sys
import time

import numpy as np

from jswa.cache.view import CACHED, FULL, KEPT, LOCAL, ArenaGeometry, CacheView
from jswa.text.tokenizer import Tokenizer
from server.core.service import Served
from server.http.process import serve_alone, set_up_logging
from server.options import ServeConfig
from tests.support.server.fake_engine import FakeEngine
from tests.support.server.harness import BYTES

SLOTS, ROWS, WINDOW, PAGE, PER_BLOCK = 200_000, 1_400, 1_024, 16, 5


class LoadedEngine(FakeEngine):
    """An engine whose view changes with the time, without requests."""

    begun = time.monotonic()

    def view(self, edges: int) -> CacheView:
        """Return the arena as it would be now: each row holds its text's full pages and its window's local pages."""
        at = int((time.monotonic() - self.begun) * 100)
        slots = np.zeros(SLOTS, np.uint8)
        launched = 200 + (np.arange(ROWS) * 37 + at) % 2_000
        first = np.maximum(0, launched - WINDOW) // PAGE
        full = launched // PAGE
        starts = PER_BLOCK + np.concatenate([[0], np.cumsum(full)[:-1]])
        for start, pages in zip(starts.tolist(), full.tolist(), strict=True):
            slots[start : start + pages] = FULL
        begin = int(starts[-1] + full[-1])
        windows = int((full - first).sum())
        slots[begin : begin + windows] = LOCAL
        slots[begin + windows : -20_000 + at % 5_000] = CACHED
        slots[-20_000:-10_000] = KEPT
        host = np.zeros(SLOTS, np.uint8)
        host[PER_BLOCK : 100_000 + at % 5_000] = CACHED
        host[-20_000:-10_000] = KEPT
        rows = np.stack([np.arange(ROWS), launched, full // 3, first, full], axis=1).astype(np.int32)
        tree = [(-1, 0, 512, 32, 0, 9, 0)]
        tree += [(0, 512, 100 + 40 * i % 900, 10, 4, i % 5, 0) for i in range(min(60, edges))]
        marks = [(i, 512 + 100 + 40 * (i - 1) % 900) for i in range(1, min(60, edges))]
        geometry = ArenaGeometry(PAGE, PER_BLOCK, SLOTS // PER_BLOCK, ROWS, WINDOW, False, True)
        return CacheView(
            geometry,
            slots,
            np.where(slots == KEPT, KEPT, CACHED).astype(np.uint8),
            rows,
            np.array(tree),
            np.array(marks).reshape(-1, 2),
            4e-4,
        )


if __name__ == "__main__":
    config = ServeConfig(served_model_name=("load",), port=0, admin_api_key="admin")
    set_up_logging(config)
    sys.exit(serve_alone(Served(LoadedEngine, Tokenizer.load(BYTES)), config))
