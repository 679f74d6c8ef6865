"""The prefix cache at the geometries of released models under heavy traffic: nothing leaks, and the laws hold."""

import random

import numpy as np
import pytest

from jswa.cache.layout import KVLayout
from jswa.cache.lease import Lease
from jswa.cache.manager import CacheManager
from jswa.cache.prefix.policies import POLICIES
from jswa.config import EvictionPolicy, Limits
from tests.support.builders import make_request
from tests.support.loops.loop import Loop
from tests.support.nights import sample
from tests.support.text.model import TextModel
from tools.cases.geometry import GEOMETRIES, model_of, slabs_of_tokens

PAGE = 64


class Churn:
    """Rows that start, run, share, end or fail, over texts that share prefixes, in a pool that stays full."""

    def __init__(self, model: str, seed: int, policy: EvictionPolicy) -> None:
        layout = KVLayout.of(model_of(model), PAGE)
        slabs = 1 + slabs_of_tokens(model, layout, 30_000)
        self.manager = CacheManager(layout, slabs, 200, 64, policy=POLICIES[policy])
        self.choose = random.Random(seed)
        draw = np.random.default_rng(seed)
        self.texts = [draw.integers(0, 5, draw.integers(100, 9_000), dtype=np.int32) for _ in range(40)]
        for text in self.texts[10:]:
            source = self.texts[int(draw.integers(0, 10))]
            length = int(draw.integers(0, min(len(text), len(source))))
            text[:length] = source[:length]
        self.rows: dict[Lease, tuple[np.ndarray, int]] = {}
        self.operations = self.hits = 0

    def step(self) -> None:
        """Do one random operation."""
        self.operations += 1
        kind = self.choose.random()
        if not self.rows or (kind < 0.15 and len(self.rows) < 12):
            self._open()
            return
        lease = self.choose.choice(list(self.rows))
        text, launched = self.rows[lease]
        if kind < 0.97 and launched < len(text):
            self._run(lease, text, launched)
        else:
            self._close(lease, keep=kind < 0.999)
        if kind > 0.9999:
            self.manager.flush()
        self.manager.compact()
        self.manager.drain_moves()

    def check(self) -> None:
        """Assert all laws."""
        self.manager.check((lease, launched) for lease, (_, launched) in self.rows.items())

    def finish(self) -> None:
        """Close all rows: every page is then free or evictable, and can be evicted."""
        for lease in list(self.rows):
            self._close(lease, keep=True)
        pool = self.manager.pool
        assert pool.free_slots + pool.evictable_slots == pool.total_slots
        assert self.manager.make_room(pool.total_slots)
        self.manager.check([])
        assert pool.free_slots == pool.total_slots

    def _open(self) -> None:
        text = self.choose.choice(self.texts)
        text = text[: self.choose.randint(2, len(text))]
        salt = self.choose.choice(["", "", "", "other"])
        match = self.manager.match(salt, text, len(text) - 1)
        lease = self.manager.open_at(match, salt, len(text))
        if lease is None:
            return
        start = match.resume.start
        if not self.manager.grow(lease, start + 1):
            self.manager.close(lease)
            return
        self.hits += start > 0
        self.rows[lease] = text, start + 1
        self.manager.slide(lease, start + 1)

    def _run(self, lease: Lease, text: np.ndarray, launched: int) -> None:
        end = min(len(text), launched + self.choose.choice([1, 64, 500, 2048]))
        if not self.manager.grow(lease, end):
            self._close(self.choose.choice(list(self.rows)), keep=True)
            return
        self.rows[lease] = text, end
        self.manager.slide(lease, end)
        self.manager.publish(lease, text, end)

    def _close(self, lease: Lease, *, keep: bool) -> None:
        text, launched = self.rows.pop(lease)
        self.manager.close(lease, text[: launched if keep else 0], prompt=len(text))


def churn(model: str, operations: int, seed: int, policy: EvictionPolicy = "learned") -> None:
    """Do `operations` operations, and check the laws twenty times on the way."""
    traffic = Churn(model, seed, policy)
    for number in range(operations):
        traffic.step()
        if number % (operations // 20) == 0:
            traffic.check()
    assert traffic.hits > operations // 100
    assert traffic.manager.prefix.retention.evictions > operations // 100
    traffic.finish()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", sample(list(GEOMETRIES), 4))
def test_100_000_operations_leak_no_page(model: str, policy: EvictionPolicy) -> None:
    """25,000 for each of four models."""
    churn(model, 25_000, seed=1, policy=policy)


@pytest.mark.nightly
@pytest.mark.parametrize("model", list(GEOMETRIES))
def test_2_million_operations_leak_no_page(model: str) -> None:
    """One of four models each night."""
    churn(model, 2_000_000, seed=2)


@pytest.mark.parametrize("model", list(GEOMETRIES))
def test_sessions_at_real_geometries_read_only_their_own_text(model: str) -> None:
    """Sessions of three turns, some of which branch off, on a pool that holds about half of them.

    The fake device asserts that each row reads only pages of its own text, and that each start obeys the law of
    revival.
    """
    layout = KVLayout.of(model_of(model), PAGE)
    text_model = TextModel(50)
    limits = Limits(4_096, 4, 1_024, PAGE, num_slabs=1 + slabs_of_tokens(model, layout, 6_000))
    loop, choose = Loop(layout, limits, text_model), random.Random(3)
    texts: dict[str, list[int]] = {}
    for turn in range(3):
        for session in range(6):
            name = f"{session}.{turn}"
            before = texts.get(f"{session}.{turn - 1}", [])
            cut = len(before) if choose.random() < 0.7 else choose.randint(0, len(before))
            prompt = before[:cut] + [choose.randrange(50) for _ in range(choose.randint(100, 700))]
            answer, _ = text_model.generate(prompt, (), len(prompt) + 90)
            texts[name] = prompt + answer
            loop.scheduler.add(make_request(name, prompt, length=len(texts[name])))
        while loop.scheduler.has_work():
            loop.step()
        loop.scheduler.check()
    stats = loop.scheduler.cache.stats()
    assert stats.cached_tokens > 0
    assert loop.runner.copies > 0
