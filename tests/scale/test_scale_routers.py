"""Routers of the simulated fleet on fake replicas, and the shapes of its traces."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from benchmarks.cache.traces import TraceRequest, expand
from benchmarks.scale.routers import BLOCK, Memory, Route, Thresholds, block_keys, make_router
from benchmarks.scale.traces import SHAPES, sessions

TOKENS = np.random.default_rng(0).integers(0, 1000, 20 * BLOCK, dtype=np.int32)


def text(length: int, *, own: int = 0) -> TraceRequest:
    """Return a request of `length` shared tokens and `own` tokens of its own."""
    rng = np.random.default_rng(length + own)
    prompt = np.concatenate([TOKENS[:length], rng.integers(1000, 2000, own, dtype=np.int32)])
    return TraceRequest(0.0, "a", 0, prompt, np.zeros(1, np.int32))


def fakes(loads: list[int], full: list[int] | None = None, start: list[int] | None = None) -> list[Any]:
    """Return fake replicas: numbers of requests, tokens of any text with full KV, and the start of a row."""

    def one(load: int, full_to: int, at: int) -> Any:
        match = SimpleNamespace(resume=SimpleNamespace(full_to=full_to, start=at))
        cache = SimpleNamespace(match=lambda salt, tokens, limit: match)
        return SimpleNamespace(outstanding=load, scheduler=SimpleNamespace(cache=cache))

    nothing = [0] * len(loads)
    return [one(*each) for each in zip(loads, full or nothing, start or nothing, strict=True)]


def router(policy: str, replicas: list[Any], **limits: Any) -> tuple[Route, list[int]]:
    """Return the router, and the list of replicas that it asked."""
    looked: list[int] = []
    return make_router(policy, cast("Any", replicas), 0, Thresholds(**limits), look=looked.append), looked


def test_memory_finds_the_longest_prefix() -> None:
    """Against a search through all texts that were sent."""
    rng, memory = np.random.default_rng(1), Memory()
    sent: list[tuple[list[int], int]] = []
    for _ in range(60):
        keys = block_keys(text(int(rng.integers(1, 15)) * BLOCK, own=int(rng.integers(0, 3)) * BLOCK).prompt)
        common = [(sum(a == b for a, b in zip(keys, other, strict=False)), at) for other, at in sent]
        found = {at: tokens for tokens, bits in memory.longest(keys, 9) for at in range(9) if bits >> at & 1}
        most = {at: max(n for n, where in common if where == at) for at in {at for _, at in sent}}
        assert found == {at: n * BLOCK for at, n in most.items() if n}
        replica = int(rng.integers(9))
        memory.add(keys, replica)
        sent.append((keys, replica))


def test_block_keys_depend_on_the_whole_prefix() -> None:
    """A changed token changes the keys from its block on."""
    other = TOKENS.copy()
    other[5 * BLOCK + 3] += 1
    same = [a == b for a, b in zip(block_keys(TOKENS), block_keys(other), strict=True)]
    assert same == [True] * 5 + [False] * 15
    assert len(block_keys(TOKENS[: 2 * BLOCK + 1])) == 2


def test_least_loaded_chooses_the_replica_with_the_fewest_requests() -> None:
    """Ties are broken at random."""
    route, _ = router("least-loaded", fakes([3, 1, 2, 1]))
    assert {route(text(100)) for _ in range(50)} == {1, 3}


def test_prefixes_decide_until_loads_differ_too_much() -> None:
    """The three branches of the rule: a prefix that is long enough, one that is too short, and unequal loads."""
    replicas = fakes([1, 0, 0])
    route, _ = router("prefix-aware", replicas, abs_threshold=4, rel_threshold=1.5)
    home = route(text(10 * BLOCK))
    assert home != 0
    replicas[home].outstanding = 4
    assert route(text(10 * BLOCK, own=100)) == home
    assert route(text(2 * BLOCK, own=8 * BLOCK)) != home
    replicas[home].outstanding = 5
    assert route(text(10 * BLOCK, own=100)) != home


@pytest.mark.parametrize(("policy", "expected"), [("kv-aware", 0), ("resume-aware", 1)])
def test_routers_that_ask_the_replicas_caches(policy: str, expected: int) -> None:
    """One replica has full KV of the whole text but no window; another has less of it, with the window."""
    replicas = fakes([0, 9, 9], full=[1280, 900, 1280], start=[0, 900, 1280])
    route, looked = router(policy, replicas, abs_threshold=4)
    assert route(text(20 * BLOCK)) == 0
    replicas[0].outstanding, replicas[1].outstanding = 9, 0
    assert route(text(20 * BLOCK)) == 1
    replicas[1].outstanding = 9
    assert route(text(20 * BLOCK)) == expected
    assert set(looked) == {0, 1}, "the third replica never got the text and need not be asked"


def test_an_unknown_policy_is_refused_by_name() -> None:
    """The error lists all policies."""
    with pytest.raises(ValueError, match=r"policy = 'best': must be one of random, least-loaded"):
        router("best", fakes([0]))


@pytest.mark.parametrize("name", SHAPES)
def test_traces_have_the_averages_of_their_shapes(name: str) -> None:
    """Turns, lengths and pauses; each turn continues all turns before it; arrivals are a Poisson process."""
    shape = SHAPES[name]
    found = list(sessions(shape, rate=0.5, replicas=4, until=1500.0, seed=3))
    assert len(found) == pytest.approx(3000, rel=0.06)
    times = np.array([lines[0]["time"] for lines in found])
    assert np.std(np.diff(times)) == pytest.approx(0.5, rel=0.1)
    turns, answers = [len(lines) for lines in found], [line["output"] for lines in found for line in lines]
    assert np.mean(turns) == pytest.approx(shape.turns, rel=0.12)
    assert np.mean(answers) == pytest.approx(shape.answer[1], rel=0.12)
    pauses = [line["think"] for lines in found for line in lines[1:]]
    assert not pauses or np.mean(pauses) == pytest.approx(shape.pause[1], rel=0.25)
    for lines in found[:20]:
        requests = expand(lines)
        for before, after in pairwise(requests):
            whole = np.concatenate([before.prompt, before.output])
            assert np.array_equal(after.prompt[: len(whole)], whole)
            assert len(after.prompt) + len(after.output) <= shape.longest
