"""Files behind host memory under random traffic, on a fake device that checks what every row reads."""

import contextlib
import errno
import os
import random
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jswa.architecture import Reach
from jswa.cache.disk.records import DiskRecord, Lanes, RecordGeometry, write_record
from jswa.cache.disk.store import DiskStore
from jswa.cache.disk.texts import DiskCache
from jswa.config import HostMemory, Limits
from tests.support.builders import LAYOUTS
from tests.support.loops.conversation import VOCAB, Conversation, make_conversation

SHAPES = [(4, Reach(6)), (1, Reach(3)), (4, Reach(8, chunked=True)), (2, Reach(4))]


def write(path: Path, record: DiskRecord, lanes: Lanes) -> None:
    """Write a file, with all lanes of the fake device in one type."""
    write_record(path, record, [lane.astype(np.int64) for lane in lanes])


def attach(
    talk: Conversation, folder: Path, identity: str, *, limit: int = 2_000_000, slots: int = 50, patience: float = 10.0
) -> DiskStore:
    """Give a conversation files behind its host memory; computing is slow, so that all is worth to be read."""
    host, layout = talk.scheduler.cache.host, talk.scheduler.layout
    assert host is not None
    page = layout.page_size
    geometry = RecordGeometry(
        identity, page, layout.pages_per_slab, len(talk.loop.runner.memory), page, np.dtype(np.int64)
    )
    store = DiskStore(folder, limit, geometry, write)
    host.disk = DiskCache(host.tier, store, slots, 1e-3 if patience < 1 else 1e3, patience)
    return store


def traffic(kind: str, shape: tuple[int, Reach], seed: int, folder: Path, texts: list[list[int]]) -> Counter[str]:
    """Run sessions that go on, also from `texts`, which earlier engines have left; return what happened."""
    choose = random.Random(seed)
    page, reach = shape
    limits = Limits(
        120,
        choose.randint(1, 5),
        choose.choice([8, 24]),
        page,
        num_slabs=1 + choose.choice([6, 20]) * (1 + 3 // page),
        host=HostMemory(1 + choose.choice([12, 60]) * (1 + 3 // page), choose.choice([1, 8, 50]), 0.05),
    )
    failures = choose.choice([0, 0, 50])  # as if each were another model
    talk = make_conversation(LAYOUTS[kind], reach, limits, failures)
    host, limit = talk.scheduler.cache.host, choose.choice([20_000, 2_000_000])
    assert host is not None
    talk.spoiled = bool(texts)  # pages that went bad may have been written
    identity, slots, patience = (
        f"{kind} {shape} {failures}",
        choose.choice([1, 8, 50]),
        choose.choice([0.0, 10.0, 10.0]),
    )
    store = attach(talk, folder, identity, limit=limit, slots=slots, patience=patience)
    for number in range(100):
        _operate(talk, choose, texts)
        if choose.random() < 0.02:
            _damage(folder, choose)
        if number % 16 == 0:
            talk.check()
            store.check()
        if len(talk.scheduler.sequences) > 6:
            talk.step()
    talk.drain()
    host.tier.check()
    store.close()
    texts += [[*request.prompt, *request.tokens] for request in talk.requests.values()]
    figures = {"written": store.written, "read": store.read, "host_tokens": talk.hits.host_tokens}
    return Counter(figures)


def _operate(talk: Conversation, choose: random.Random, texts: list[list[int]]) -> None:
    """Do one random operation."""
    kind = choose.random()
    if kind < 0.25:
        prompt: list[int] = []
        before = [*texts, *([*r.prompt, *r.tokens] for r in talk.requests.values())]
        if before and choose.random() < 0.8:
            prompt = choose.choice(before)
            prompt = prompt[: choose.choice([len(prompt), choose.randint(1, len(prompt))])]
        prompt = (prompt + [choose.randrange(VOCAB) for _ in range(choose.randint(1, 20))])[:110]
        talk.add(prompt, choose.randint(1, 8), set(), choose.choice(["", "", "", "other"]))
    elif kind < 0.28 and talk.requests:
        talk.abort(choose.choice(list(talk.requests)[-4:]))
    elif kind < 0.285:
        talk.scheduler.cache.flush()
    elif kind < 0.29:
        talk.spoil(choose.randrange(999), full=choose.random() < 0.5)
    elif kind < 0.30 and talk.scheduler.running:
        talk.scheduler.preempt(choose.choice(talk.scheduler.running).request.request_id)
    else:
        talk.step()


def _damage(folder: Path, choose: random.Random) -> None:
    """Tear or delete a file."""
    files = sorted(folder.glob("*.kv"))
    if not files:
        return
    path = choose.choice(files)
    if choose.random() < 0.5:
        path.unlink(missing_ok=True)
    elif path.exists():
        data = bytearray(path.read_bytes())
        data[choose.randrange(len(data))] ^= 255
        path.write_bytes(data)


@pytest.mark.parametrize("kind", list(LAYOUTS))
def test_texts_come_back_from_the_disk_as_they_were(kind: str, tmp_path: Path) -> None:
    """Every token is that of a request alone, after restarts too, though files are torn and deleted."""
    happened: Counter[str] = Counter()
    for number, shape in enumerate(SHAPES[:2]):
        texts: list[list[int]] = []
        for run in range(2):
            happened += traffic(kind, shape, 20 + run, tmp_path / str(number), texts)
    assert happened["written"] > 0
    assert happened["read"] > 0
    assert happened["host_tokens"] > 0


@pytest.mark.nightly
@pytest.mark.parametrize("kind", list(LAYOUTS))
def test_many_restarts_find_no_wrong_page(kind: str, tmp_path: Path) -> None:
    """Two kinds of layouts each night."""
    happened: Counter[str] = Counter()
    for seed in range(100, 300):
        shape, texts = SHAPES[seed % (2 if kind == "full only" else 4)], list[list[int]]()
        for run in range(3):
            happened += traffic(kind, shape, 10 * seed + run, tmp_path / str(seed), texts)
    assert min(happened["written"], happened["read"], happened["host_tokens"]) > 0


def long_texts(talk: Conversation) -> None:
    """Run texts that neither the device nor the host holds, one after the other, and the first ones again."""
    for number in range(12):
        assert talk.add([(number % 8 + at * at) % VOCAB for at in range(40)], 2, set())
        while talk.scheduler.has_work():
            talk.step()


def short_of_memory(folder: Path, patience: float) -> tuple[Conversation, DiskStore]:
    """Return a conversation on a device and a host with memory for one and two of `long_texts`."""
    limits = Limits(120, 2, 24, 4, num_slabs=1 + 30, host=HostMemory(1 + 30, 8, 0.05))
    talk = make_conversation((1, 1), Reach(6), limits)
    return talk, attach(talk, folder, "a model", patience=patience)


def test_a_disk_that_hangs_costs_one_request_its_patience(tmp_path: Path) -> None:
    """Every file is a pipe that nobody writes to: requests compute their texts, and only one of them has waited."""
    talk, store = short_of_memory(tmp_path, 10.0)
    long_texts(talk)
    assert talk.scheduler.cache.stats().disk_tokens > 3 * 39, "four prompts of 40 tokens, asked again"
    assert store.drain(10.0)
    store.close()
    talk, store = short_of_memory(tmp_path, 0.3)
    files = list(tmp_path.glob("*.kv"))
    for path in files:
        path.unlink()
        os.mkfifo(path)
    long_texts(talk)
    host = talk.scheduler.cache.host
    assert host is not None
    assert host.disk is not None
    assert host.disk.wanted is not None, "nobody has asked"
    asked = host.disk.wanted
    assert store.reading
    assert host.disk.find(asked.salt, asked.tokens, len(asked.tokens), 0) is None, "others would wait too"
    assert store.seconds(asked.records) >= 0.3, "the time that was waited does not count"
    long_texts(talk)
    assert host.disk.wanted is asked
    assert talk.scheduler.cache.stats().disk_tokens == 0
    for path in files:
        with contextlib.suppress(OSError):  # nobody reads it
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    store.close(0.1)


def test_a_full_disk_or_a_slow_one_is_left_out(tmp_path: Path) -> None:
    """Requests run as without it; what is not written is counted."""
    talk, store = short_of_memory(tmp_path, 10.0)
    store.close()
    host = talk.scheduler.cache.host
    assert host is not None
    go = threading.Event()

    def full(path: Path, record: DiskRecord, lanes: Lanes) -> None:
        go.wait()
        raise OSError(errno.ENOSPC, "No space left on device")

    store = DiskStore(tmp_path, 2_000_000, store.geometry, full)
    host.disk = DiskCache(host.tier, store, 50, 1e3)
    long_texts(talk)
    assert (store.written, store.dropped) == (0, 0)
    go.set()
    assert store.drain(10.0)
    assert store.dropped > 0
    assert not list(tmp_path.glob("*.kv"))
    dropped = store.dropped
    long_texts(talk)
    assert store.dropped > dropped, "nothing is written for some seconds"
    store.check()
    assert store.used == 0
    store.close()
