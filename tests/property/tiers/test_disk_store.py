"""The files behind host memory, under faults: what is found is what was put, or it is a miss."""

import errno
import hashlib
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jswa.cache.disk.records import DiskRecord, Key, Lanes, RecordGeometry, Tail, size_of, write_record
from jswa.cache.disk.store import DiskStore
from jswa.errors import ConfigError

GEOMETRY = RecordGeometry("a model", 4, 2, lanes=2, elems=3, dtype=np.dtype(np.float32))
OTHER = GEOMETRY._replace(identity="another")
LIMIT = 6_000


def record(number: int, *, tail: bool = False, geometry: RecordGeometry = GEOMETRY) -> DiskRecord:
    """A record of two pages, given by a number."""
    digest = hashlib.sha256(bytes([number])).digest()[:16]
    pages: tuple[Key, ...] = (("full", digest), ("local", digest))
    return DiskRecord(geometry.identity, b"tree", bytes([number % 3]), pages, Tail(b"before", 3) if tail else None)


def contents(number: int, geometry: RecordGeometry = GEOMETRY) -> Lanes:
    """Its rows: one of the full page, two of the local page; another model has others."""
    return [np.full((3, 3), 10 * number + lane + 0.5 * (geometry is OTHER), np.float32) for lane in range(2)]


class StoreMachine(RuleBasedStateMachine):
    """Records come, are read and go, while files are torn and deleted, the disk is full, and engines end."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.full = False
        self.hurt: set[int] = set()  # records whose files were torn, deleted, or perhaps not written
        self.geometry = GEOMETRY
        self.store = self.opened()

    def opened(self) -> DiskStore:
        """The folder, as a new engine finds it."""
        return DiskStore(self.folder, LIMIT, self.geometry, self.write, rest=0.0)

    def write(self, path: Path, own: DiskRecord, lanes: Lanes) -> None:
        """Write a file, if there is room."""
        if self.full:
            path.with_suffix(".part").write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        write_record(path, own, lanes)

    @rule(number=st.integers(0, 30), tail=st.booleans())
    def put(self, number: int, tail: bool) -> None:
        """Put a record, if there is no such page."""
        own = record(number, tail=tail, geometry=self.geometry)
        if not self.store.has(own.pages[0]) and self.store.room(3):
            self.hurt.discard(number)
            self.store.put(own, contents(number, self.geometry))

    @rule(number=st.integers(0, 30))
    def fetch(self, number: int) -> None:
        """Read a record: it is what was put."""
        found = self.store.find(record(number).pages[1])
        if found is None:
            return
        got: list[Lanes | None] = []
        self.store.use([found[0]])
        self.store.fetch(found[0], got.append)
        assert self.store.drain(10.0)
        assert len(got) == 1
        if got[0] is None:
            assert number in self.hurt, "a whole file was a miss"
            assert self.store.find(record(number).pages[1]) is None
        else:
            assert found[1] == 1
            assert all(np.array_equal(a, b) for a, b in zip(got[0], contents(number, self.geometry), strict=True))

    @rule(
        number=st.integers(0, 30), how=st.sampled_from(["delete", "shorten", "flip", "empty"]), at=st.integers(0, 999)
    )
    def damage(self, number: int, how: str, at: int) -> None:
        """Damage a file beneath the store."""
        assert self.store.drain(10.0)
        for path in self.folder.glob("*.kv"):
            if path.name not in {record(number, tail=tail).name for tail in (False, True)}:
                continue
            data = bytearray(path.read_bytes())
            if not data:  # it was shortened to nothing before
                continue
            data[at % len(data)] ^= 1
            self.hurt.add(number)
            if how == "delete":
                path.unlink()
            else:
                path.write_bytes({"shorten": data[: at % len(data)], "flip": data, "empty": bytearray()}[how])

    @rule()
    def fill(self) -> None:
        """Let the disk be full, or not any more."""
        self.full = not self.full

    @rule(first=st.integers(0, 2))
    def forget(self, first: int) -> None:
        """Delete some records."""
        self.store.forget(lambda own: own.first == bytes([first]))

    @rule(other=st.booleans())
    def restart(self, other: bool) -> None:
        """Start anew, perhaps with another model: its pages are not found."""
        with pytest.raises(ConfigError, match="another engine"):
            self.opened()
        self.store.close()
        self.store.close()
        (self.folder / ("0" * 40 + ".part")).write_bytes(b"half")
        (self.folder / "notes.kv").write_text("not ours")
        self.geometry = OTHER if other else GEOMETRY
        self.store = self.opened()
        assert (self.folder / "notes.kv").exists()
        assert not list(self.folder.glob("*.part"))

    @precondition(lambda self: self.geometry is GEOMETRY)
    @rule(number=st.integers(0, 30))
    def deep(self, number: int) -> None:
        """A record that is too large is dropped."""
        own = DiskRecord(
            "a model", b"t", b"f", tuple(("full", number.to_bytes(2) + i.to_bytes(2)) for i in range(400)), None
        )
        dropped = self.store.dropped
        assert size_of(own, GEOMETRY) > LIMIT
        self.store.put(own, [np.zeros((400, 3), np.float32)] * 2)
        assert self.store.dropped == dropped + 1

    @invariant()
    def laws(self) -> None:
        """The files never take more than they may."""
        self.store.check()  # with what is being written
        assert self.store.drain(10.0)
        self.store.check()
        assert sum(path.stat().st_size for path in self.folder.glob("?" * 40 + ".kv")) <= LIMIT

    def teardown(self) -> None:
        """Leave nothing."""
        self.store.close()
        shutil.rmtree(self.folder)


def test_a_file_that_is_torn_is_told_once_as_a_miss(tmp_path: Path) -> None:
    """Whoever waits for its pages would wait for ever otherwise."""
    store = DiskStore(tmp_path, LIMIT, GEOMETRY)
    torn, whole = records = record(1), record(2)
    for number, own in enumerate(records, 1):
        store.put(own, contents(number))
    assert store.drain(10.0)
    (tmp_path / torn.name).write_bytes(b"torn")
    got: list[list[Lanes | None]] = [[], []]
    for own, found in zip(records, got, strict=True):
        store.fetch(own, found.append)
    assert store.drain(10.0)
    store.close()
    assert got[0] == [None]
    assert len(got[1]) == 1
    assert store.find(torn.pages[0]) is None
    assert store.find(whole.pages[0]) == (whole, 0)


TestDiskStore = StoreMachine.TestCase
TestDiskStore.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
