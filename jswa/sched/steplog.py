"""Counts and times of an engine's steps: as sums, and as a line in the log every 200 steps."""

import logging
import time
from bisect import bisect_left
from dataclasses import dataclass

from jswa.plan import StepPlan
from jswa.sched.drafts.drafting import DraftStats
from jswa.sched.scheduler import Scheduler

_log = logging.getLogger("jswa")
_LOG_EVERY = 200  # steps
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384)  # bounds of `StepStats.sizes`


@dataclass(frozen=True)
class StepStats:
    """Sums since the engine's start; times in seconds of the thread that drives it.

    Attributes:
        tokens: tokens that the steps have run, of prompts and generated text.
        generated: tokens that came back, including those of rows that had already ended, and forced tokens.
        plan, launch, apply: host time before, at and after the launch of a step.
        wait: host time spent waiting for the device.
        compiled_in_steps: programs compiled while requests waited; 0 in a healthy engine.
        compiled_beside: programs compiled after the start, in another thread than the steps.
        drafts: what was drafted; None without speculative decoding.
        sizes: steps by their tokens: at most each bound of `STEP_TOKENS` and above the one before, then the others.
    """

    steps: int = 0
    tokens: int = 0
    generated: int = 0
    plan: float = 0.0
    launch: float = 0.0
    wait: float = 0.0
    apply: float = 0.0
    compiled_in_steps: int = 0
    compiled_beside: int = 0
    drafts: DraftStats | None = None
    sizes: tuple[int, ...] = (0,) * (len(STEP_TOKENS) + 1)


class StepLog:
    """Sums over steps, and a log line every so many: rows, tokens held by kind of layer, throughput, queue."""

    def __init__(self) -> None:
        self._tokens = self._generated = 0
        self._plan = self._launch = self._wait = self._apply = 0.0
        self._sizes = [0] * (len(STEP_TOKENS) + 1)
        self._then = (time.monotonic(), 0, 0)
        self._drafts_then = (0, 0)

    def launched(self, begin: float, planned: float, end: float) -> None:
        """Count a step that was planned and launched; times of `time.perf_counter`."""
        self._plan += planned - begin
        self._launch += end - planned

    def finished(self, forced: int, begin: float, filled: float, end: float) -> None:
        """Count forced tokens, the masks and the launch of the second half of a step; times of `time.perf_counter`."""
        self._generated += forced
        self._plan += filled - begin
        self._launch += end - filled

    def applied(self, plan: StepPlan, generated: int, begin: float, there: float, end: float) -> None:
        """Count a step whose tokens were awaited and applied."""
        self._tokens += plan.num_tokens
        self._sizes[bisect_left(STEP_TOKENS, plan.num_tokens)] += 1
        self._generated += generated
        self._wait += there - begin
        self._apply += end - there

    def stats(self, compiled_in_steps: int, compiled_beside: int, drafts: DraftStats | None) -> StepStats:
        """Return the sums."""
        return StepStats(
            sum(self._sizes), self._tokens, self._generated, self._plan, self._launch, self._wait, self._apply,
            compiled_in_steps, compiled_beside, drafts, tuple(self._sizes),
        )  # fmt: skip

    def log_when_due(self, scheduler: Scheduler) -> None:
        """Log a line if it is due."""
        if sum(self._sizes) % _LOG_EVERY or not _log.isEnabledFor(logging.INFO):
            return
        now, stats, layout = time.monotonic(), scheduler.stats(), scheduler.layout
        then, tokens, generated = self._then
        self._then = now, self._tokens, self._generated
        seconds, slots, page = max(now - then, 1e-9), max(stats.total_slots, 1), layout.page_size
        local = stats.local_pages * layout.pages_per_slab
        _log.info(
            "%d rows running, %d waiting; full tokens: %d, usage %.2f; local tokens: %d, usage %.2f; arena %.1f %% "
            "free, %.1f %% cached; prefix hits %.1f %%; %.0f tokens/s generated, %.0f of prompts",
            stats.running,
            stats.waiting,
            stats.full_pages * page,
            stats.full_pages / slots,
            stats.local_pages * page,
            local / slots,
            100 * stats.free_slots / slots,
            100 * stats.cached_slots / slots,
            100 * scheduler.cache.hits.rate,
            (self._generated - generated) / seconds,
            max(0, self._tokens - tokens - self._generated + generated) / seconds,
        )
        if scheduler.rows.speculates:
            drafts, accepted = scheduler.drafting.stats().sums
            before, self._drafts_then = self._drafts_then, (drafts, accepted)
            count = drafts - before[0]
            _log.info("%d tokens drafted, %.0f %% of them right", count, 100 * (accepted - before[1]) / max(count, 1))
