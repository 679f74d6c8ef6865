"""The caches that jswa is compared with in `benchmarks.cache.radix`, on traces worked out by hand."""

import numpy as np

from benchmarks.cache import radix
from benchmarks.cache.replay import FullEverywhere, Infinite, Result, replay
from benchmarks.cache.traces import TraceRequest, any_next, multi_turn


def request(session: str, turn: int, prompt: list[int], output: list[int]) -> TraceRequest:
    return TraceRequest(0.0, session, turn, np.array(prompt, np.int32), np.array(output, np.int32))


def cached(cache: FullEverywhere | Infinite, requests: list[TraceRequest]) -> list[int]:
    """Run the requests one after another; return the cached tokens of each."""
    found = []
    for one in requests:
        cache.submit(one, "name")
        (hit,) = cache.step().values()
        assert hit.prompt_tokens == len(one.prompt)
        found.append(hit.cached_tokens)
    return found


A = request("a", 0, [1, 2, 3, 4, 5], [6, 7])  # leaves the pages 1 2, 3 4, 5 6: the last token has no KV
B = request("b", 0, [1, 2, 9, 9, 9], [9])  # shares the first page, and leaves 9 9 behind it


def test_full_kv_everywhere_hits_whole_pages_and_evicts_the_least_recently_used() -> None:
    """In room for three pages of two tokens. A page's prefix is part of what it is; the end of a text goes first.

    1. A finds nothing and leaves, from the oldest on, [5 6] [3 4] [1 2].
    2. B finds [1 2] and leaves [3 4] [9 9] [1 2]: [5 6] was the oldest.
    3. A finds [1 2] and [3 4]: its last prompt token must be computed, so four of five tokens are the most. It leaves
       [5 6] [3 4] [1 2], and [9 9] is gone.
    4. B finds [1 2] alone.
    5. The page 9 9 at the start of a text is another page than 9 9 behind 1 2.
    """
    requests = [A, B, A, B, request("c", 0, [9, 9, 9], [9])]
    assert cached(FullEverywhere(3, 2), requests) == [0, 2, 4, 2, 0]
    assert cached(FullEverywhere(9, 2), requests) == [0, 2, 4, 4, 0]


def test_full_kv_everywhere_computes_the_last_prompt_token() -> None:
    """A prompt of whole pages that are all cached still runs its last page."""
    twice = [request("a", 0, [1, 2, 3, 4], [5]), request("b", 0, [1, 2, 3, 4], [5])]
    assert cached(FullEverywhere(9, 2), twice) == [0, 2]


def test_an_infinite_cache_hits_to_the_token() -> None:
    """All but the last token of a prompt that was seen, and what two texts begin with alike."""
    assert cached(Infinite(), [A, B, A, request("a", 1, [1, 2, 3, 4, 5, 6, 7, 8], [9])]) == [0, 2, 4, 6]


def test_a_replay_adds_up_hits_by_turn() -> None:
    """The second turn waits for the first although both may run at once; 6 of its 9 tokens are in whole pages."""
    second = request("a", 1, [1, 2, 3, 4, 5, 6, 7, 8, 9], [1])
    result: Result = replay(FullEverywhere(9, 2), [A, second, B], running=2)
    assert result.rounds == {0: [2, 10], 1: [6, 9]}
    assert (result.cached, result.prompt, result.revived) == (8, 19, 0)
    assert result.hit_rate == 8 / 19


def test_any_session_speaks_next_and_each_keeps_its_order() -> None:
    """The requests are those of the trace in turns, in another order."""
    lines = multi_turn(5, 4, 3, 2)
    mixed = any_next(lines)
    assert sorted(map(str, mixed)) == sorted(map(str, lines))
    for session in "01234":
        assert [line["turn"] for line in mixed if line["session"] == session] == [0, 1, 2, 3]
    assert [line["turn"] for line in mixed] != sorted(line["turn"] for line in mixed), "sessions take turns"
    assert any_next(lines) == mixed
    assert any_next(lines, seed=1) != mixed


def test_an_engine_without_windows_has_the_same_bytes() -> None:
    """A pool of 131,072 tokens on all layers; without windows it holds them, less the page that nobody gets."""
    hybrid, blind = (radix.engine("gemma-3-27b", 131_072, 16, 4096, hybrid=hybrid) for hybrid in (True, False))
    sizes = [one.scheduler.limits.num_slabs * one.scheduler.layout.slab_bytes(2) for one in (hybrid, blind)]
    assert abs(sizes[0] / sizes[1] - 1) < 0.01
    assert blind.scheduler.layout.local is None
    assert blind.scheduler.cache.pool.total_slots == 131_072 // radix.PAGE
