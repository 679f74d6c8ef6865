"""The second prefix cache in host memory under random traffic, on a fake device that checks what every row reads."""

import random
from collections import Counter
from typing import Any, Never

import numpy as np
import pytest
from jaxtyping import Int

from jswa.architecture import Reach
from jswa.cache.prefix.edges import BRANCH, TEXT_END
from jswa.cache.prefix.policies import POLICIES
from jswa.config import HostMemory, Limits
from jswa.exec.host_pages import HostPages
from tests.property.test_scheduler import SHAPES
from tests.support.builders import LAYOUTS
from tests.support.fakes import FakeRunner
from tests.support.loops.conversation import VOCAB, Conversation, make_conversation

SOME_SHAPES = [(4, Reach(6)), (1, Reach(3))]


class Forgetful:
    """A runner of which one of a hundred copies to the host fails. `lost`: how many did."""

    slots_per_copy = 3

    def __init__(self, runner: FakeRunner, choose: random.Random) -> None:
        self.lost = 0
        self.move, self.write_slots = runner.move, runner.write_slots
        self._runner = runner
        self._choose = choose

    def read_slots(self, ids: Int[np.ndarray, " n"]) -> list[Any]:
        """Return the contents of slots, or what cannot be read."""
        if self._choose.random() > 0.01:
            return list(self._runner.read_slots(ids))
        self.lost += 1
        return [Lost() for _ in self._runner.memory]


class Lost:
    """An array that never arrives."""

    def __array__(self, *_: Any, **__: Any) -> Never:
        """Fail, as the arrays of a device that is gone do."""
        raise RuntimeError("the copy has failed")


def traffic(kind: str, shape: tuple[int, Reach], seed: int, operations: int, check_every: int = 1) -> Counter[str]:
    """Run sessions that go on, part, are aborted, and whose KV goes bad; return what happened.

    The memory of the device holds a few of them, that of the host about three times as many. Pages arrive on the host
    a few steps after they were read, and in one of three runs some are lost.
    """
    choose = random.Random(seed)
    page, reach = shape
    limits = Limits(
        120,
        choose.randint(1, 5),
        choose.choice([8, 24]),
        page,
        num_slabs=1 + choose.choice([6, 20, 60]) * (1 + 3 // page),
        prefix_cache_interval=choose.choice([None, None, 16]),
        radix_eviction_policy=list(POLICIES)[seed % 2],
        host=HostMemory(1 + choose.choice([4, 60, 200]) * (1 + 3 // page), choose.choice([1, 8, 50]), 0.05),
    )
    talk = make_conversation(LAYOUTS[kind], reach, limits, failures=choose.choice([0, 0, 50]))
    talk.check_every = check_every
    forgetful = Forgetful(talk.loop.runner, choose)
    if seed % 3 == 1:
        talk.loop.host_pages = HostPages(forgetful, talk.loop.host_contents())
    names: list[str] = []
    for number in range(operations):
        _operate(talk, choose, names)
        if number % 16 == 0:
            talk.check()
        if len(talk.scheduler.sequences) > 8:
            talk.step()
    host = talk.scheduler.cache.host
    assert host is not None
    assert not host.tier.kept, "texts wait to be written, though there is no disk"
    talk.drain()
    host.tier.check()
    figures = {"copied": host.tier.copied, "recalled": host.recalled, "host_tokens": talk.hits.host_tokens}
    return Counter({**figures, "lost": forgetful.lost})


def _operate(talk: Conversation, choose: random.Random, names: list[str]) -> None:
    """Do one random operation."""
    kind = choose.random()
    if kind < 0.25:
        prompt: list[int] = []
        if names and choose.random() < 0.8:
            before = talk.requests[choose.choice(names[-12:])]
            prompt = [*before.prompt, *before.tokens]
            prompt = prompt[: choose.choice([len(prompt), choose.randint(1, len(prompt))])]
        prompt = (prompt + [choose.randrange(VOCAB) for _ in range(choose.randint(1, 20))])[:110]
        name = talk.add(prompt, choose.randint(1, 8), set(), choose.choice(["", "", "", "other"]))
        names += [] if name is None else [name]
    elif kind < 0.28 and names:
        talk.abort(choose.choice(names[-4:]))
    elif kind < 0.2805:
        talk.scheduler.cache.flush()
    elif kind < 0.283:
        talk.spoil(choose.randrange(999), full=choose.random() < 0.5)
    elif kind < 0.29 and talk.scheduler.running:
        talk.scheduler.preempt(choose.choice(talk.scheduler.running).request.request_id)
    else:
        talk.step()


@pytest.mark.parametrize("kind", list(LAYOUTS))
def test_texts_come_back_from_host_memory_as_they_were(kind: str) -> None:
    """Every token is that of a request alone, and all laws hold, though copies fail."""
    happened: Counter[str] = Counter()
    for seed, shape in enumerate(SOME_SHAPES):
        happened += traffic(kind, shape, seed, 120)
    assert happened["recalled"] > 0
    assert happened["host_tokens"] > 0


@pytest.mark.nightly
@pytest.mark.parametrize("kind", list(LAYOUTS))
def test_a_million_operations_lose_no_page_and_find_no_wrong_one(kind: str) -> None:
    """Two hundred thousand operations on each kind of layout; the laws are checked after every eighth step."""
    happened: Counter[str] = Counter()
    shapes = SHAPES["sliding"] + (SHAPES["chunked"] if kind != "full only" else [])
    for seed in range(400):
        happened += traffic(kind, shapes[seed % len(shapes)], 1_000 + seed, 500, check_every=8)
    assert min(happened["recalled"], happened["host_tokens"], happened["lost"]) > 0


def test_a_text_that_comes_back_is_known_by_its_turns() -> None:
    """Where its turns ended is known as on the device, and there is no other place beside them."""
    limits = Limits(120, 2, 24, 4, num_slabs=1 + 30, host=HostMemory(1 + 120, 8, 0.05))
    talk = make_conversation((1, 1), Reach(6), limits)

    def turn(prompt: list[int]) -> list[int]:
        name = talk.add(prompt, 3, set())
        assert name is not None
        while talk.scheduler.has_work():
            talk.step()
        return [*prompt, *talk.requests[name].tokens]

    text, others, ends = [1] * 30, 0, list[int]()
    for _ in range(3):
        text = turn(text)
        ends.append(len(text) - 1)  # there is no KV of the last token
        for _ in range(3):
            others += 1
            turn([(others + at * at) % VOCAB for at in range(40)])
        text = [*text, 2, 2]
    assert talk.scheduler.cache.stats().host_tokens > 0
    ends.append(len(turn(text)) - 1)
    path, _ = talk.scheduler.cache.prefix.tree.walk("", np.array(text, np.int32))
    places = {at: kind for node in path for at, kind in node.places.items()}
    found = {at: kind for at, kind in places.items() if kind < BRANCH and kind % 2 == TEXT_END}
    assert found == {end: TEXT_END + 2 * turns for turns, end in enumerate(reversed(ends))}
