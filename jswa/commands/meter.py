"""Figures of a loaded model while a command uses it."""

import time
from typing import Any


class Meter:
    """Tokens per second and the peak number of KV pages in use, over one streamed call."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._start = time.monotonic()
        self._tokens = self._full = self._local = 0

    def count(self, token_ids: list[int]) -> None:
        """Count a piece's tokens, and look at the pages in use."""
        now = self._llm.stats()
        self._tokens += len(token_ids)
        self._full, self._local = max(self._full, now.full_pages), max(self._local, now.local_pages)

    def report(self) -> str:
        """Return the statistics as a line."""
        seconds = time.monotonic() - self._start
        pool, limits, cached = self._llm.stats(), self._llm.engine.limits, self._llm.cache_stats()
        return (
            f"{self._tokens} tokens in {seconds:.2f} s, {self._tokens / seconds:.0f} tokens/s; "
            f"peak KV pages of {limits.page_size} tokens: {self._full} full, {self._local} local; "
            f"at the end: {pool.full_pages} full, {pool.local_pages} local; "
            f"prefix cache: {cached.hit_rate:.1%} of {cached.prompt_tokens} prompt tokens, "
            f"{cached.full_pages} full and {cached.local_pages} local pages cached"
        )
