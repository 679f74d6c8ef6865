"""Texts of prefix trees, and restoring them (jswa/storage/snapshot.py, restore.py)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st
from jaxtyping import Int

from jswa.architecture import Reach
from jswa.cache.host.texts import Pages
from jswa.cache.manager import CacheManager
from jswa.cache.moves import Move, origins
from jswa.config import Limits
from jswa.storage.restore import Restored, restore
from jswa.storage.snapshot import Captured, Mark, SavedText, capture, check
from tests.support.builders import LAYOUTS, make_layout, make_request, share
from tests.support.loops.loop import Loop
from tests.support.text.model import TextModel

VOCAB = 5  # so that texts branch often, and inside pages
SHAPES = [(page, Reach(window)) for page in (1, 4) for window in (1, 3, 9)] + [
    (4, Reach(4, chunked=True)),
    (4, Reach(12, chunked=True)),
]
MODEL = TextModel(VOCAB)


def make_loop(layers: tuple[int, int], shape: tuple[int, Reach], slabs: int) -> Loop:
    """Return a loop with a scheduler and a fake device of its own."""
    layout = make_layout(shape[0], shape[1], num_full=layers[0], num_local=layers[1])
    return Loop(layout, Limits(60, 4, 12, shape[0], num_slabs=1 + slabs), MODEL)


class Traffic:
    """Requests with random texts and common prefixes; their tokens are checked against runs alone."""

    def __init__(self, loop: Loop, rng: np.random.Generator, texts: list[list[int]] | None = None) -> None:
        self.loop = loop
        self.rng = rng
        self.texts = texts if texts is not None else []
        self.sent = 0

    def prompt(self) -> list[int]:
        """Return new text, or a part of an earlier text with another end."""
        start: list[int] = []
        if self.texts and self.rng.random() < 0.8:
            text = self.texts[self.rng.integers(len(self.texts))]
            start = text[: self.rng.integers(len(text) + 1)]
        end: list[int] = self.rng.integers(0, VOCAB, self.rng.integers(1, 25)).tolist()
        return (start + end)[:50]

    def send(self, count: int, *, drain: bool = True) -> None:
        """Send `count` requests and run them to their end, or for a few steps only."""
        for _ in range(count):
            prompt = self.prompt()
            length = min(len(prompt) + int(self.rng.integers(1, 12)), 60)
            if len(prompt) + 1 > self.loop.scheduler.capacity:
                continue
            self.loop.scheduler.add(make_request(f"r{self.sent}", prompt, length=length))
            self.sent += 1
            tokens, _ = MODEL.generate(prompt, (), min(length, self.loop.scheduler.capacity))
            self.texts.append(prompt + tokens)
            for _ in range(int(self.rng.integers(0, 4))):
                self.step()
        while drain and self.loop.scheduler.has_work():
            self.step()

    def step(self) -> None:
        """Run one step and check all laws."""
        self.loop.step()
        self.loop.scheduler.check()


def read(loop: Loop, slots: Int[np.ndarray, " n"]) -> list[Int[np.ndarray, "n p"]]:
    """Return the contents of these slots on the fake device."""
    return [array[origins(loop.scheduler.cache.moves, slots)] for array in loop.runner.memory]


def load(loop: Loop, taken: Captured, contents: list[Int[np.ndarray, "n p"]], salt: str = "") -> Restored:
    """Restore texts and their contents into another loop."""
    cache = loop.scheduler.cache
    check(taken.texts, loop.runner.layout, VOCAB)
    done = restore(cache, salt, taken.texts)
    loop.runner.move(np.array(cache.drain_moves(), np.int32).reshape(-1, 3))
    for array, saved in zip(loop.runner.memory, contents, strict=True):
        array[done.slots] = saved[done.rows]
    loop.scheduler.check()
    return done


def resumes(cache: CacheManager, prompts: list[list[int]], salt: str = "") -> list[Any]:
    """Return where rows with these prompts would start, and whether texts branch there."""
    matches = [cache.match(salt, np.array(prompt, np.int32), len(prompt) - 1) for prompt in prompts]
    return [(match.resume, match.branch, len(match.full), len(match.local)) for match in matches]


def window_ends(texts: list[SavedText]) -> list[int]:
    """Return where the windows of texts end."""
    return sorted(end for text in texts for end, *_ in text.windows)


def assert_no_worse(after: list[Any], before: list[Any], page: int) -> None:
    """Assert that as many whole pages are found as before; a page in which texts branch now may be lost in part."""
    assert all(new[0].full_to >= old[0].full_to // page * page for new, old in zip(after, before, strict=True))


shapes = given(
    layers=st.sampled_from(list(LAYOUTS.values())),
    shape=st.sampled_from(SHAPES),
    slabs=st.integers(8, 200),
    seed=st.integers(0, 2**32 - 1),
)


@share(20)
@shapes
def test_a_restored_cache_gives_the_same_hits(
    layers: tuple[int, int], shape: tuple[int, Reach], slabs: int, seed: int
) -> None:
    """Every prompt starts at the same position on the same memory, and gets the tokens of a cold run."""
    rng = np.random.default_rng(seed)
    first, second = make_loop(layers, shape, slabs), make_loop(layers, shape, slabs)
    traffic = Traffic(first, rng)
    traffic.send(12)
    taken = capture(first.scheduler.cache.prefix, "")
    first.scheduler.check()
    done = load(second, taken, read(first, taken.slots))
    assert done.tokens == taken.tokens
    assert sorted(done.rows.tolist()) == list(range(len(taken.slots))), "saved pages are missing"
    prompts = [*traffic.texts, *(traffic.prompt() for _ in range(20))]
    before, after = (resumes(loop.scheduler.cache, prompts) for loop in (first, second))
    # Edges that used to branch may be one edge now: a page in the middle of it is found again.
    lone = any(len(node.children) == 1 for node in first.scheduler.cache.prefix.tree.nodes() if node.parent)
    assert lone or after == before
    assert all(new[0].start >= old[0].start for new, old in zip(after, before, strict=True))
    event(f"the same: {after == before}")
    again = capture(second.scheduler.cache.prefix, "")
    assert again.tokens == taken.tokens
    assert len(again.slots) == len(taken.slots)
    assert window_ends(again.texts) == window_ends(taken.texts)
    event(f"windows: {min(len(window_ends(again.texts)), 5)}, texts: {min(len(again.texts), 5)}")
    Traffic(second, rng, traffic.texts).send(8)
    event(f"cached: {second.scheduler.cache.stats().cached_tokens > 0}")


@share(20)
@shapes
def test_a_snapshot_can_be_taken_and_restored_while_rows_run(
    layers: tuple[int, int], shape: tuple[int, Reach], slabs: int, seed: int
) -> None:
    """It contains only published pages, up to the published ends."""
    rng = np.random.default_rng(seed)
    first, second = make_loop(layers, shape, slabs), make_loop(layers, shape, slabs)
    traffic, other = Traffic(first, rng), Traffic(second, rng)
    traffic.send(10, drain=False)
    other.texts = list(traffic.texts)
    other.send(5, drain=False)
    taken = capture(first.scheduler.cache.prefix, "")
    contents = read(first, taken.slots)
    before = resumes(second.scheduler.cache, traffic.texts)
    load(second, taken, contents)
    after = resumes(second.scheduler.cache, traffic.texts)
    assert_no_worse(after, before, shape[0])
    event(f"helped: {after != before}")
    other.send(5, drain=False)
    load(second, taken, contents)
    other.send(5)
    traffic.send(3)


@share(20)
@shapes
@example(layers=(1, 0), shape=(4, Reach(1)), slabs=88, seed=590)  # a cached page gives way to a longer one
def test_a_restore_into_a_small_arena_leaves_texts_out(
    layers: tuple[int, int], shape: tuple[int, Reach], slabs: int, seed: int
) -> None:
    """Nothing is evicted for it; the texts that fit are those of the snapshot.

    Where one of them goes on inside a cached page, it brings its own page, and the memory of the other is free.
    """
    rng = np.random.default_rng(seed)
    first, second = make_loop(layers, shape, 200), make_loop(layers, shape, slabs // 4 + 4)
    traffic, other = Traffic(first, rng), Traffic(second, rng)
    traffic.send(12)
    other.send(2)
    cache = second.scheduler.cache
    held, kept = other.texts[:], resumes(cache, other.texts)
    evictions, free = cache.stats().evictions, cache.pool.free_slots
    inside = sum(node.end % shape[0] > 0 for node in cache.prefix.tree.nodes())
    taken = capture(first.scheduler.cache.prefix, "")
    done = load(second, taken, read(first, taken.slots))
    assert cache.stats().evictions == evictions
    assert_no_worse(resumes(cache, held), kept, shape[0])
    assert done.tokens <= taken.tokens
    assert len(done.slots) <= free + inside * cache.layout.page_slots
    event(f"restored: {4 * done.tokens // max(taken.tokens, 1)} quarters")
    other.texts += traffic.texts
    other.send(8)


def test_the_last_used_branch_is_restored_first() -> None:
    """The arena fits the common prefix and one of three branches."""
    shape = (4, Reach(5))
    first = make_loop((1, 1), shape, 100)
    common = [1] * 16
    for end in ([2] * 20, [3] * 20, [4] * 20):
        first.scheduler.add(make_request(f"r{end[0]}", common + end, length=37))
        while first.scheduler.has_work():
            first.step()
    hot = np.array(common + [3] * 20, np.int32)
    lease = first.scheduler.cache.open_at(first.scheduler.cache.match("", hot, 35), "", 36)
    assert lease is not None
    first.scheduler.cache.close(lease)
    taken = capture(first.scheduler.cache.prefix, "")
    second = make_loop((1, 1), shape, 15)
    load(second, taken, read(first, taken.slots))
    found = resumes(second.scheduler.cache, [common + [end] * 20 for end in (2, 3, 4)])
    assert [match[0].full_to for match in found] == [16, 35, 16]
    assert found[1] == resumes(first.scheduler.cache, [common + [3] * 20])[0]


def test_a_page_that_moves_during_a_restore_is_written_where_it_went(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holes that appear while the second text is restored let the pool move the pages of the first."""
    first, second = (make_loop((1, 6), (4, Reach(5)), 40) for _ in range(2))
    prompts = [[1] * 9, [2] * 9]
    for number, prompt in enumerate(prompts):
        first.scheduler.add(make_request(f"r{number}", prompt, length=10))
    while first.scheduler.has_work():
        first.step()
    taken = capture(first.scheduler.cache.prefix, "")
    cache, calls = second.scheduler.cache, list[int]()
    m = cache.pool.pages_per_slab
    held, compact = cache.pool.alloc_full(m * m).reshape(m, m), cache.compact

    def compact_later() -> None:
        calls.append(len(cache.moves))
        if len(calls) == 2:
            cache.pool.free_full(held[:, 0])
        compact()

    monkeypatch.setattr(cache, "compact", compact_later)
    done = restore(cache, "", taken.texts)
    assert len(cache.moves) > calls[1] == 0, "no page has moved"
    cache.pool.free_full(held[:, 1:].reshape(-1))
    second.runner.move(np.array(cache.drain_moves(), np.int32).reshape(-1, 3))
    for array, saved in zip(second.runner.memory, read(first, taken.slots), strict=True):
        array[done.slots] = saved[done.rows]
    second.scheduler.check()
    assert all(match[0].full_to == 9 for match in resumes(cache, [[*prompt, 3] for prompt in prompts]))
    Traffic(second, np.random.default_rng(0), [[*prompt, 3, 3, 3] for prompt in prompts]).send(8)


def test_a_snapshot_contains_one_salt() -> None:
    """After a restore only requests of that salt find its texts."""
    first, second = (make_loop((1, 1), (4, Reach(5)), 60) for _ in range(2))
    for salt, prompt in (("a", [1] * 20), ("b", [2] * 20)):
        request = dataclasses.replace(make_request(salt, prompt, length=24), cache_salt=salt)
        first.scheduler.add(request)
    while first.scheduler.has_work():
        first.step()
    prefix = first.scheduler.cache.prefix
    assert capture(prefix, "").tokens == 0
    taken = capture(prefix, "a")
    assert {*taken.texts[0].tokens[:20].tolist()} == {1}
    assert load(second, taken, read(first, taken.slots), salt="c").tokens == taken.tokens
    cache = second.scheduler.cache
    assert resumes(cache, [[1] * 20], "c")[0][0].full_to == 19
    assert resumes(cache, [[1] * 20], "a")[0][0].full_to == 0
    cache.flush()
    assert load(second, capture(prefix, ""), read(first, np.zeros(0, np.int32))).tokens == 0
    assert not cache.prefix.tree.roots


def test_ages_and_numbers_of_uses_are_restored() -> None:
    """Texts that were used often and recently stay longest."""
    first, second = (make_loop((1, 1), (4, Reach(5)), 100) for _ in range(2))
    Traffic(first, np.random.default_rng(3)).send(15)

    def seen(loop: Loop) -> set[tuple[Any, ...]]:
        prefix, out = loop.scheduler.cache.prefix, set()
        for node in prefix.tree.nodes():
            path: list[int] = []
            above = node.parent
            while above is not None:
                path, above = [*above.tokens.tolist(), *path], above.parent
            path += node.tokens.tolist()
            if not node.children:
                out.add(("leaf", *path, prefix.tree.clock - node.last, node.hits))
            for end, w in node.windows.items():
                out.add(("window", *path[:end], w.branch, prefix.tree.clock - w.last, w.hits))
        return out

    taken = capture(first.scheduler.cache.prefix, "")
    load(second, taken, read(first, taken.slots))
    assert len(seen(first)) > 10
    assert seen(second) == seen(first)


def test_contents_are_read_from_where_pages_were_before_pending_moves() -> None:
    """A page that moved twice is read at its origin; a copied page is read at its source."""
    moves = [Move(1, 20, rename=True), Move(20, 25, rename=True), Move(2, 1, rename=False)]
    assert origins(moves, np.array([25, 1, 2, 7], np.int32)).tolist() == [1, 2, 2, 7]


def changed(change: Callable[[Any], Any], field: str) -> Callable[[SavedText], SavedText]:
    """Return a change of one field of a text."""
    return lambda text: text._replace(**{field: change(getattr(text, field))})


def marks(*mark: Any) -> Callable[[SavedText], SavedText]:
    """Return a change of the windows of a text."""
    return changed(lambda _: [mark], "windows")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (changed(lambda n: n - 2**40, "age"), "a number out of range"),
        (changed(lambda n: n + 2**62, "hits"), "a number out of range"),
        (changed(lambda n: 1.5, "age"), "a number out of range"),
        (changed(lambda n: True, "hits"), "a number out of range"),
        (changed(lambda a: a[:0], "tokens"), "a text without tokens"),
        (changed(lambda a: a + VOCAB, "tokens"), "a token that is not in the vocabulary"),
        (changed(lambda a: np.full_like(a, -1), "tokens"), "a token that is not in the vocabulary"),
        (changed(lambda a: Pages(np.zeros_like(a.full), a.local), "pages"), "a page is missing"),
        (marks(1000, False, 0, 0), "a window beyond its text"),
        (marks(0, False, 0, 0), "a window beyond its text"),
        (marks(-1, False, 0, 0), "a number out of range"),
        (marks(1, False, "0", 0), "a number out of range"),
        (marks(1, 1, 0, 0), "a window that is no branch"),
    ],
)
def test_impossible_texts_are_refused(change: Callable[[SavedText], SavedText], reason: str) -> None:
    """With values out of range or of wrong types: each text in turn."""
    loop = make_loop((1, 1), (4, Reach(5)), 100)
    Traffic(loop, np.random.default_rng(3)).send(15)
    texts, layout = capture(loop.scheduler.cache.prefix, "").texts, loop.runner.layout
    check(texts, layout, VOCAB)
    for number, text in enumerate(texts):
        without = text._replace(windows=[]) if reason == "a text without tokens" else text
        with pytest.raises(ValueError, match=reason):
            check([*texts[:number], change(without), *texts[number + 1 :]], layout, VOCAB)
    alone = make_layout(4, Reach(5), num_full=1, num_local=0)
    with pytest.raises(ValueError, match="local pages for a model without local layers"):
        check(texts, alone, VOCAB)


@share(2)
@given(data=st.data(), layers=st.sampled_from(list(LAYOUTS.values())), shape=st.sampled_from(SHAPES))
def test_restoring_any_texts_that_pass_the_check_keeps_the_laws(
    data: st.DataObject, layers: tuple[int, int], shape: tuple[int, Reach]
) -> None:
    """Duplicate texts, windows with holes and unused pages are restored as far as possible."""
    loop, p = make_loop(layers, shape, data.draw(st.integers(4, 60))), shape[0]
    Traffic(loop, np.random.default_rng(0)).send(data.draw(st.integers(0, 3)), drain=data.draw(st.booleans()))
    texts, row, m = list[SavedText](), 1, loop.runner.layout.pages_per_slab
    for number in range(data.draw(st.integers(0, 6))):
        start = data.draw(st.sampled_from([[], *(text.tokens.tolist() for text in texts)]))
        text = (start + data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=14)))[:40]
        count = -(-len(text) // p)
        held = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
        full = row + np.arange(count) if layers[0] else np.zeros(count, np.int64)
        local = np.where(held, row + count + m * np.arange(count), 0) * (layers[1] > 0)
        row += count * (1 + m)
        windows: list[Mark] = [
            (end, end % 2 == 1, end, number) for end in data.draw(st.lists(st.integers(1, 30), max_size=3))
        ]
        age = data.draw(st.integers(0, 9))
        texts.append(SavedText(np.array(text, np.int32), Pages(full, local), age, age, windows))
    cache = loop.scheduler.cache
    try:
        check(texts, loop.runner.layout, VOCAB)
    except ValueError:
        event("refused")
        return
    done = restore(cache, "", texts)
    loop.scheduler.check()
    assert len(set(done.slots.tolist())) == len(done.slots)
    assert all(0 <= number < row for number in done.rows.tolist())
    event(f"entered: {done.tokens > 0}")
