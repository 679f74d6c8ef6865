"""Counters of the prefix cache since the start, or since it was flushed."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jswa.types import MissReason, PrefixHit


@dataclass(frozen=True)
class CacheStats:
    """Counters at one moment: prompt tokens as in `PrefixHit`, summed over the requests that have been scheduled.

    Attributes:
        revived_tokens: cached tokens of requests that rebuilt a lost window from full-attention KV.
        host_tokens: cached tokens that only pages from host memory made possible.
        host_written_slots, host_read_slots: slots copied to host memory, and back.
        host_usage: share of the host memory that texts take.
        disk_tokens: the part of host_tokens that came to host memory from the disk.
        disk_written_bytes, disk_read_bytes: of files behind host memory.
        disk_dropped: files that were not written, because the disk was too slow or full.
        disk_usage: share of the bytes that the files may take.
        missed: prompt tokens that were computed, by reason.
        full_pages, local_pages: pages that the cache holds, alone or with rows.
        evictable_full_pages, evictable_local_pages: pages that the cache holds alone.
        windows: positions at which the cache keeps the local pages that a request needs to resume.
        evictions: evicted windows and ends of texts.
        slid_pages: local pages that have left the windows of running rows.
    """

    requests: int
    prompt_tokens: int
    cached_tokens: int
    full_hit_tokens: int
    replayed_tokens: int
    revived_tokens: int
    missed: dict[MissReason, int]
    full_pages: int
    local_pages: int
    evictable_full_pages: int
    evictable_local_pages: int
    windows: int
    evictions: int
    slid_pages: int = 0
    host_tokens: int = 0
    host_written_slots: int = 0
    host_read_slots: int = 0
    host_usage: float = 0.0
    disk_tokens: int = 0
    disk_written_bytes: int = 0
    disk_read_bytes: int = 0
    disk_dropped: int = 0
    disk_usage: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that no layer computed."""
        return self.cached_tokens / max(self.prompt_tokens, 1)


@dataclass
class HitCounter:
    """Sums over `PrefixHit`s."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    full_hit_tokens: int = 0
    replayed_tokens: int = 0
    revived_tokens: int = 0
    missed: dict[MissReason, int] = field(default_factory=dict)
    host_tokens: int = 0
    disk_tokens: int = 0

    @property
    def rate(self) -> float:
        """Share of all prompt tokens that no layer computed."""
        return self.cached_tokens / max(self.prompt_tokens, 1)

    def count(self, hit: PrefixHit) -> None:
        """Count a request."""
        self.requests += 1
        self.prompt_tokens += hit.prompt_tokens
        self.cached_tokens += hit.cached_tokens
        self.full_hit_tokens += hit.full_hit_tokens
        self.replayed_tokens += hit.replayed_tokens
        self.revived_tokens += hit.cached_tokens if hit.revived else 0
        self.host_tokens += hit.host_tokens
        self.disk_tokens += hit.disk_tokens
        for reason, tokens in hit.missed().items():
            self.missed[reason] = self.missed.get(reason, 0) + tokens


def for_clients(missed: Mapping[MissReason, int]) -> dict[MissReason, int]:
    """Return missed tokens by reason as clients may see them.

    Tokens that another salt has cached count as cold: the reason would reveal the prompts of other tenants.
    """
    shown = dict(missed)
    if "salt" in shown:
        shown["cold"] = shown.pop("salt") + shown.get("cold", 0)
    return shown
