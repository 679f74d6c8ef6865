"""Waiting requests for which text comes back from host memory or the disk."""

import time
from collections.abc import Callable

from jswa.cache.disk.texts import DiskCache
from jswa.cache.host.recall import HostCache
from jswa.cache.manager import CacheManager
from jswa.cache.prefix.cache import PrefixMatch
from jswa.sched.batch import Batch
from jswa.sched.sequence import Sequence


class Recalling:
    """The waiting request for which text comes back from host memory, if there is one: `owner`."""

    def __init__(self, cache: CacheManager, has_room: Callable[[Batch, Sequence, PrefixMatch], bool]) -> None:
        self.owner: Sequence | None = None
        self._reader: Sequence | None = None  # the last request for which text was read from the disk
        self._cache = cache
        self._has_room = has_room

    def waits(self, batch: Batch, sequence: Sequence, match: PrefixMatch) -> bool:
        """Return whether a waiting request waits for text from host memory, which may begin to come now.

        Each request has text brought back once, and only when it has room to begin. Text on the disk comes to host
        memory first.
        """
        host = self._cache.host
        if host is not None and host.disk is not None and self._waits_for(host.disk, batch, sequence, match):
            return True
        if host is None or not sequence.reads_cache or sequence.recalled_from is not None:
            return host is not None and self.owner is sequence
        tokens = sequence.tokens
        found = host.find(self._cache.tree_key(sequence.request.cache_salt), tokens, len(tokens) - 1, match)
        if found is None or self.owner is not None:
            return found is not None
        if not self._has_room(batch, sequence, match) or not self._cache.recall(found):
            return False
        self.owner, sequence.recalled_from = sequence, match.resume.start
        return True

    def settle(self, host: HostCache) -> None:
        """Let the owner match its text if all of it has been sent to the device, or if it has been given up."""
        if host.disk is not None:
            host.disk.settle()
        if self.owner is not None:
            host.finish(self._cache.epoch)
            self.owner = None if host.active is None else self.owner

    def drop(self, sequence: Sequence) -> None:
        """Give up the text of a request that ends."""
        if self.owner is sequence and self._cache.host is not None:
            self._cache.host.cancel()
            self.owner = None

    def _waits_for(self, disk: DiskCache, batch: Batch, sequence: Sequence, match: PrefixMatch) -> bool:
        """Return whether a request waits for text from the disk, which may begin to be read now."""
        if not sequence.reads_cache or sequence.disk_until == 0 or sequence is self.owner:
            return False
        if sequence.disk_until is not None and time.monotonic() > sequence.disk_until:
            sequence.disk_until = 0.0
            disk.give_up()
            return False
        own, reads = self._reader is sequence, disk.wanted is not None
        if sequence.disk_gain[1] and not (own and (reads or disk.torn)):  # all that was found has been read
            sequence.disk_until = 0.0
            return False
        if reads and sequence.disk_until is not None:
            return True
        if not self._has_room(batch, sequence, match):
            return False
        salt, tokens = self._cache.tree_key(sequence.request.cache_salt), sequence.tokens
        found = disk.find(salt, tokens, len(tokens) - 1, match.resume.start)
        if found is None:
            sequence.disk_until = 0.0
            return False
        if sequence.disk_until is None:
            sequence.disk_until = time.monotonic() + disk.patience(found)
        if disk.wanted is None:
            disk.begin(found)
            self._reader = sequence
            sequence.disk_gain = found.at.start - found.gain, found.at.start
        return True
