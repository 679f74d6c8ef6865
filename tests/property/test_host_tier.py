"""The second prefix cache in host memory under random traffic, on a fake device that checks what every row reads."""

import random
from collections import Counter

import pytest

from jswa.architecture import Reach
from jswa.config import HostMemory, Limits
from tests.property.test_scheduler import VOCAB, Conversation, make_conversation
from tests.support.builders import LAYOUTS


def traffic(kind: str, shape: tuple[int, Reach], seed: int, operations: int) -> Counter[str]:
    """Run sessions that go on, part, are aborted, and whose KV goes bad; return what happened.

    The memory of the device holds a few of them, that of the host about three times as many. Pages arrive on the host
    a few steps after they were read.
    """
    choose = random.Random(seed)
    page, reach = shape
    limits = Limits(
        120,
        choose.randint(1, 5),
        choose.choice([8, 24]),
        page,
        num_blocks=1 + choose.choice([6, 20, 60]) * (1 + 3 // page),
        prefix_cache_interval=choose.choice([None, None, 16]),
        host=HostMemory(1 + choose.choice([4, 60, 200]) * (1 + 3 // page), choose.choice([1, 8, 50]), 0.05),
    )
    talk = make_conversation(LAYOUTS[kind], reach, limits, failures=choose.choice([0, 0, 50]))
    names: list[str] = []
    for number in range(operations):
        _operate(talk, choose, names)
        if number % 16 == 0:
            talk.check()
        if len(talk.scheduler.sequences) > 8:
            talk.step()
    host = talk.scheduler.cache.host
    assert host is not None
    talk.drain()
    host.tier.check()
    return Counter(copied=host.tier.copied, recalled=host.recalled, host_tokens=talk.hits.host_tokens)


def _operate(talk: Conversation, choose: random.Random, names: list[str]) -> None:
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
    """Every token is that of a request alone, and all laws hold."""
    happened: Counter[str] = Counter()
    shapes = [(4, Reach(6)), (1, Reach(3)), (4, Reach(12, chunked=True))]
    for seed, shape in enumerate(shapes):
        happened += traffic(kind, shape, seed, 400)
    assert happened["recalled"] > 0
    assert happened["host_tokens"] > 0
