"""Records in a folder, bounded in bytes: the record that was used longest ago goes first.

Only the engine's thread calls the store. Threads of its own write and read files, so a disk that is slow or full delays
no step: a record that does not fit the queue is dropped, and a file that cannot be read is a miss, with a reason in the
log. An index in memory says which pages there are; a start makes it anew from the headers of the files.

Laws (`check`): the files, with those that are being written, take at most `limit` bytes; the index has exactly the
pages of the records of this engine, each once.
"""

import fcntl
import logging
import os
import re
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import IO

from jswa.cache.disk.records import (
    PARTIAL,
    SUFFIX,
    DiskRecord,
    Key,
    Lanes,
    RecordGeometry,
    read_header,
    read_rows,
    rows_of,
    size_of,
    write_record,
)
from jswa.cache.disk.worker import DiskWorker
from jswa.errors import ConfigError

_log = logging.getLogger("jswa")
_MOST_QUEUED = 256 * 2**20  # bytes that wait to be written
_MOST_TOUCHED = 1_000  # changes that may wait for the disk until uses are not written down any more
_REST = 10.0  # seconds
_READERS = 4  # threads: the checksums of one are slower than a fast disk
_RATE = 2e9  # bytes per second that one is assumed to read, if none has read lately
_LATELY = 600.0  # seconds
_OWN = re.compile(rf"[0-9a-f]{{40}}({re.escape(SUFFIX)}|{re.escape(PARTIAL)})")

Write = Callable[[Path, DiskRecord, Lanes], None]


def lock_folder(folder: Path) -> IO[bytes]:
    """Create a folder if there is none, and lock it until the returned file is closed.

    Raises ConfigError if it cannot be written, or if another engine has locked it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (folder / "lock").open("wb")
    except OSError as error:
        raise ConfigError("disk_kv", str(folder), f"must be a folder that can be written: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise ConfigError("disk_kv", str(folder), "is used by another engine: give another folder") from error
    return lock


class DiskStore:
    """Owns a folder and the index of its files.

    Args:
        limit: bytes that the files may take.
        write: writes a file; tests let it fail.
        rest: seconds in which nothing is written after a write has failed.
        lock: from `lock_folder`, and owned by the store from now on; None: the folder is locked here.

    Attributes:
        written, read: bytes written and read so far.
        dropped: records that were not written, because the disk was too slow or full.
        used: bytes of the files.
    """

    def __init__(
        self,
        folder: Path,
        limit: int,
        geometry: RecordGeometry,
        write: Write = write_record,
        rest: float = _REST,
        lock: IO[bytes] | None = None,
    ) -> None:
        self.geometry = geometry
        self.limit = limit
        self.written = self.read = self.dropped = self.used = 0
        self._rate, self._rated = _RATE, 0.0
        self._folder = folder
        self._write = write
        self._rest = rest
        self._records: dict[str, DiskRecord] = {}  # by name, used longest ago first
        self._index: dict[Key, tuple[DiskRecord, int]] = {}
        self._tails: dict[bytes, list[int]] = {}  # by digest of the text before last pages, their tokens
        self._queued = 0
        self._rest_until = 0.0
        self._lock = lock or lock_folder(folder)
        self._fill()
        self._writer = DiskWorker("jswa-disk-write")
        self._readers = [DiskWorker(f"jswa-disk-read-{number}") for number in range(_READERS)]

    @property
    def reading(self) -> bool:
        """Whether a read is under way."""
        return any(reader.left for reader in self._readers)

    def seconds(self, records: list[DiskRecord]) -> float:
        """Return how long it probably takes to read records."""
        return sum(record.size for record in records) / (self._recent_rate() * min(len(records), _READERS))

    def find(self, key: Key) -> tuple[DiskRecord, int] | None:
        """Return the record that has a page, and the page's first row; None if no complete file has it."""
        found = self._index.get(key)
        return found if found is not None and found[0].ready else None

    def has(self, key: Key) -> bool:
        """Return whether a record has a page, though it may not have been written yet."""
        return key in self._index

    def tails(self, before: bytes) -> Iterable[int]:
        """Return the lengths of part-filled last pages behind a text, given by its digest."""
        return self._tails.get(before, ())

    def room(self, slots: int) -> bool:
        """Return whether a record of so many slots can be written now; if not, it counts as dropped."""
        size = slots * self.geometry.slot_bytes
        fits = not self._queued or self._queued + size <= _MOST_QUEUED
        if not fits or time.monotonic() < self._rest_until or size > self.limit:
            self.dropped += 1
            return False
        return True

    def put(self, record: DiskRecord, lanes: Lanes) -> None:
        """Have a record written, none of whose pages another has. Takes the arrays over."""
        record.size, name = size_of(record, self.geometry), record.name
        if record.size > self.limit or name in self._records:
            self.dropped += 1
            return
        while self.used + record.size > self.limit:
            self._remove(next(iter(self._records)))
        self._add(name, record)
        self._queued += record.size

        def done(result: Exception | None) -> None:
            self._queued -= record.size
            if not isinstance(result, Exception):
                self.written += record.size
                record.ready = True
                return
            self.dropped += 1
            self._rest_until = time.monotonic() + self._rest
            _log.warning("%s cannot be written, and nothing is for %g s: %s", self._folder / name, self._rest, result)
            if self._records.get(name) is record:
                self._remove(name)

        self._writer.submit(lambda: self._write(self._folder / name, record, lanes), done)

    def use(self, records: Iterable[DiskRecord]) -> None:
        """Note that records are used now."""
        for record in records:
            name = record.name
            if self._records.get(name) is record:
                self._records[name] = self._records.pop(name)
                if record.ready and self._writer.left < _MOST_TOUCHED:
                    self._writer.submit(partial(os.utime, self._folder / name), lambda _: None)

    def fetch(self, record: DiskRecord, then: Callable[[Lanes | None], None]) -> None:
        """Have a record read; `settle` passes its rows on. None: the file is torn or gone, and is a miss now."""
        name = record.name

        def work() -> tuple[Lanes, float]:
            begin = time.monotonic()
            return read_rows(self._folder / name, record, self.geometry), time.monotonic() - begin

        def done(result: tuple[Lanes, float] | Exception) -> None:
            if isinstance(result, Exception):
                if self._records.get(name) is record:  # if it has been evicted meanwhile, its file may be gone
                    _log.warning("%s is a miss: %s", self._folder / name, _reason(result))
                    self._remove(name)
                then(None)
                return
            lanes, seconds = result
            self.read += record.size
            rate = self._recent_rate()
            self._note_rate(rate + (record.size / max(seconds, 1e-6) - rate) / 4)
            then(lanes)

        min(self._readers, key=lambda reader: reader.left).submit(work, done)

    def slow(self, seconds: float, size: int) -> None:
        """Note that so many bytes have not been read in so many seconds."""
        self._note_rate(min(self._recent_rate(), size / seconds))

    def forget(self, gone: Callable[[DiskRecord], bool]) -> None:
        """Delete the records of this engine for which `gone` is true."""
        for name, record in list(self._records.items()):
            if record.identity == self.geometry.identity and gone(record):
                self._remove(name)

    def settle(self, seconds: float = 0.0) -> None:
        """Handle the results of the threads; if a read is under way, wait up to `seconds` for its result."""
        self._writer.settle()
        for reader in self._readers:
            before = reader.left
            reader.settle(seconds)
            if reader.left < before:
                seconds = 0.0

    def drain(self, seconds: float) -> bool:
        """Wait until the threads have done all that they were given; return whether they have."""
        end = time.monotonic() + seconds
        for worker in (self._writer, *self._readers, self._writer):  # which deletes the files that readers find torn
            while worker.left and time.monotonic() < end:
                worker.settle(max(1e-3, end - time.monotonic()))
        return not self._writer.left and not self.reading

    def close(self, seconds: float = 5.0) -> None:
        """Write the waiting records, for at most `seconds`, and release the folder. Closing twice is fine."""
        if self._lock.closed:
            return
        if not self.drain(seconds):
            _log.warning("%s: %d bytes were not written in time", self._folder, self._queued)
        for worker in (self._writer, *self._readers):
            worker.close()
        self._lock.close()

    def check(self) -> None:
        """Assert the laws above."""
        own = [record for record in self._records.values() if record.identity == self.geometry.identity]
        assert self.used == sum(record.size for record in self._records.values()) <= self.limit
        pages = [(key, record) for record in own for key in record.pages]
        assert dict(pages) == {key: found[0] for key, found in self._index.items()}
        assert len(pages) == len(self._index), "a page is in two records"
        tails = sorted((record.tail.before, record.tail.tokens) for record in own if record.tail is not None)
        assert tails == sorted((before, count) for before, counts in self._tails.items() for count in counts)
        assert all(self._tails.values())

    def _recent_rate(self) -> float:
        return self._rate if time.monotonic() < self._rated + _LATELY else _RATE

    def _note_rate(self, rate: float) -> None:
        self._rate, self._rated = rate, time.monotonic()

    def _fill(self) -> None:
        """Make the index from the files. Files of other engines count too, and are deleted once they are the oldest."""
        folder, others = self._folder, 0
        for name, record in self._scan():
            own = record.identity == self.geometry.identity
            if own and any(key in self._index for key in record.pages):
                (folder / name).unlink(missing_ok=True)
                continue
            others += not own
            self._add(name, record)
        while self.used > self.limit:
            name = next(iter(self._records))
            self._drop(name)
            (folder / name).unlink(missing_ok=True)
        _log.info(
            "%s has %d bytes of the prefix cache in %d files; %d are of another model, weights, dtype or page size",
            folder, self.used, len(self._records), others,
        )  # fmt: skip

    def _scan(self) -> list[tuple[str, DiskRecord]]:
        """Return the files with their headers, used longest ago first; delete torn files."""
        found: list[tuple[float, str, DiskRecord]] = []
        for path in self._folder.iterdir():
            if not _OWN.fullmatch(path.name):
                continue  # not ours: it is left alone, and does not count
            try:
                if path.suffix == PARTIAL:
                    raise ValueError("was not completed")
                record = read_header(path)
                if record.identity == self.geometry.identity and record.size != size_of(record, self.geometry):
                    raise ValueError("is torn")
            except Exception as error:  # a header may hold any JSON
                _log.warning("%s is deleted: %s", path, _reason(error))
                path.unlink(missing_ok=True)
            else:
                found.append((path.stat().st_mtime, path.name, record))
        return [(name, record) for _, name, record in sorted(found, key=lambda entry: entry[:2])]

    def _add(self, name: str, record: DiskRecord) -> None:
        self._records[name] = record
        self.used += record.size
        if record.identity != self.geometry.identity:
            return
        for key, row in zip(record.pages, rows_of(record, self.geometry), strict=True):
            self._index[key] = record, row
        if record.tail is not None:
            self._tails.setdefault(record.tail.before, []).append(record.tail.tokens)

    def _drop(self, name: str) -> None:
        record = self._records.pop(name)
        self.used -= record.size
        if record.identity != self.geometry.identity:
            return
        for key in record.pages:
            del self._index[key]
        if record.tail is not None:
            self._tails[record.tail.before].remove(record.tail.tokens)
            if not self._tails[record.tail.before]:
                del self._tails[record.tail.before]

    def _remove(self, name: str) -> None:
        """Drop a record, and have its file deleted before the next write."""
        self._drop(name)
        self._writer.submit(partial((self._folder / name).unlink, missing_ok=True), lambda _: None)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"
