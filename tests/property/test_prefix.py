"""Laws of tree, pool and leases under random calls, against a dictionary of texts (jswa/cache/prefix/cache.py)."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from jaxtyping import Int

from jswa.architecture import Reach
from jswa.cache.layout import KVLayout
from jswa.cache.lease import Lease
from jswa.cache.manager import CacheManager
from jswa.cache.prefix.cache import PrefixMatch
from jswa.cache.prefix.policies import POLICIES, MakePolicy
from jswa.cache.prefix.resume import replay_start
from jswa.config import Limits
from tests.support.builders import LAYOUTS, make_layout, share
from tests.support.loops.conversation import make_conversation
from tests.support.prefix.any_victim import AnyVictim
from tests.support.prefix.subscriber import Followed
from tests.support.text.model import TextModel, first_seen

SHAPES = {  # page sizes, and reaches of local layers
    "sliding": [(page, Reach(window)) for page in (1, 4, 16) for window in (1, 3, 6, 20)],
    "chunked": [(page, Reach(page * pages, chunked=True)) for page in (1, 4, 16) for pages in (1, 3)],
    "looking back": [(page, Reach(page * pages, True, 1)) for page in (1, 4) for pages in (1, 3)]
    + [(1, Reach(3, chunked=True, lookback=2)), (16, Reach(16, chunked=True, lookback=1))],
}
WIDTH = 64
LONGEST = 90
TAILS = st.lists(st.integers(0, 2), min_size=1, max_size=40)
SALTS = st.sampled_from(["", "other"])


@dataclass(eq=False)
class Row:
    """A running row. `start`: the first position that it computes; `published`: end of what it has published."""

    lease: Lease
    salt: str
    tokens: list[int]
    start: int
    launched: int
    published: int = 0


class Memory:
    """Contents of the pages: for each position a hash of the text up to it, and whether its local KV is exact."""

    def __init__(self, manager: CacheManager) -> None:
        self.layout, self.m = manager.layout, manager.pool.pages_per_slab
        slots, page = manager.pool.num_slabs * self.m, manager.layout.page_size
        self.full = np.zeros((slots, page), np.int64)
        self.local = np.zeros((slots, page), np.int64)
        self.exact = np.zeros((slots, page), bool)

    def move(self, manager: CacheManager) -> None:
        """Carry out the moves that the manager has planned."""
        for source, target, _ in manager.drain_moves():
            for memory in (self.full, self.local, self.exact):
                memory[target] = memory[source]

    def write(self, row: Row, end: int) -> None:
        """Write positions [launched, end), as a step does."""
        page, hashes = self.layout.page_size, marks(row.tokens)
        for position in range(row.launched, end):
            if self.layout.full is not None and position >= row.lease.full_write_from:
                self.full[row.lease.full.ids[position // page], position % page] = hashes[position]
            if self.layout.local is not None:
                slab = row.lease.local.ids[position // page]
                self.local[slab * self.m, position % page] = hashes[position]
                self.exact[slab * self.m, position % page] = position >= row.lease.exact_from

    def check(self, match: PrefixMatch, tokens: list[int]) -> None:
        """Assert that a match has KV of this text, and that all its local KV is exact."""
        page, hashes, at = self.layout.page_size, marks(tokens), match.resume
        for position in range(at.full_to if self.layout.full is not None else 0):
            assert self.full[match.full[position // page], position % page] == hashes[position]
        first = at.local_visible_from // page
        for position in range(at.local_visible_from, at.boundary):
            slab = match.local[position // page - first]
            assert self.local[slab * self.m, position % page] == hashes[position]
            assert self.exact[slab * self.m, position % page]


def marks(tokens: list[int]) -> list[int]:
    """Return a hash of every prefix of the text."""
    out, state = [], 0
    for token in tokens:
        state = TextModel.fold(state, [token])
        out.append(state >> 1)
    return out


def shared(a: list[int], b: list[int]) -> int:
    """Return the length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class PrefixMachine(RuleBasedStateMachine):
    """Rows over a few texts with long common prefixes. `texts`: those that are cached unless memory was ever short."""

    layers: tuple[int, int]  # numbers of full and local layers; set by a subclass
    shapes: list[tuple[int, Reach]]  # set by a subclass

    @initialize(
        data=st.data(),
        slabs=st.sampled_from([12, 40, 4000]),
        interval=st.sampled_from([None, 7]),
        policy=st.sampled_from([*POLICIES.values(), AnyVictim]),
        windows=st.booleans(),
    )
    def start(
        self, data: st.DataObject, slabs: int, interval: int | None, policy: MakePolicy, *, windows: bool
    ) -> None:
        page_size, reach = data.draw(st.sampled_from(self.shapes))
        layout = make_layout(page_size, reach, num_full=self.layers[0], num_local=self.layers[1])
        self.layout: KVLayout = layout
        width = math.ceil(LONGEST / page_size)
        self.manager = CacheManager(layout, 1 + slabs, width, 64, interval=interval, policy=policy)
        self.memory = Memory(self.manager)
        self.followed = Followed(self.manager.prefix.tree, windows=windows)
        self.rows: list[Row] = []
        self.texts: list[tuple[str, list[int]]] = []
        self.written: list[tuple[str, list[int]]] = []  # what the cache may have besides
        self.seen: list[list[int]] = [[]]
        self.roomy = slabs == 4000
        self.hits = self.copies = self.replays = 0

    @precondition(lambda self: len(self.rows) < 5)
    @rule(data=st.data(), tail=TAILS, salt=SALTS)
    def enter(self, data: st.DataObject, tail: list[int], salt: str) -> None:
        self.begin(data, tail, salt)

    def begin(self, data: st.DataObject, tail: list[int], salt: str) -> None:
        """Begin a row whose text continues a part of another."""
        before = data.draw(st.sampled_from(self.seen))
        tokens = (before[: data.draw(st.integers(0, len(before)))] + tail)[:LONGEST]
        self.seen.append(tokens)
        match = self.manager.match(salt, array(tokens), len(tokens) - 1)
        assert match.resume == self.manager.match(salt, array(tokens), len(tokens) - 1).resume, (
            "match changed the cache"
        )
        self.memory.check(match, tokens)
        self._check_start(match, salt, tokens)
        lease = self.manager.open_at(match, salt, len(tokens))
        if lease is None:
            return
        self.copies += len(self.manager.moves) > 0
        self.memory.move(self.manager)
        start = match.resume.start
        self.hits += start > 0
        self.replays += start < match.resume.full_to
        self.rows.append(Row(lease, salt, tokens, start, start))
        if not self._run(self.rows[-1], start + 1):
            self._end(self.rows[-1], keep=False)

    @rule(data=st.data(), tail=TAILS, salt=SALTS, chunk=st.integers(5, 90))
    def run_whole(self, data: st.DataObject, tail: list[int], salt: str, chunk: int) -> None:
        """Run a row from its beginning to its end, as far as memory allows."""
        before = len(self.rows)
        self.begin(data, tail, salt)
        if len(self.rows) > before:
            row = self.rows[-1]
            while row.launched < len(row.tokens) and self._run(row, min(len(row.tokens), row.launched + chunk)):
                self.manager.publish(row.lease, array(row.tokens), row.launched)
            self._end(row, keep=True)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), chunk=st.integers(1, 30))
    def run(self, data: st.DataObject, chunk: int) -> None:
        """Run one step of a row and publish its known tokens."""
        row = data.draw(st.sampled_from(self.rows))
        end = min(len(row.tokens), row.launched + chunk)
        if end > row.launched and self._run(row, end) and data.draw(st.booleans()):
            self.manager.publish(row.lease, array(row.tokens), end)
            row.published = end

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), more=st.lists(st.integers(0, 2), min_size=1, max_size=20))
    def decode(self, data: st.DataObject, more: list[int]) -> None:
        """Let a row that has run its text generate a token."""
        row = data.draw(st.sampled_from(self.rows))
        if row.launched == len(row.tokens):
            row.tokens = (row.tokens + more)[:LONGEST]

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), keep=st.booleans())
    def end(self, data: st.DataObject, keep: bool) -> None:
        """End a row that has finished, was aborted or preempted, or has failed, perhaps with a step in flight."""
        row = data.draw(st.sampled_from(self.rows))
        known = data.draw(st.integers(max(row.start + 1, row.published), row.launched))
        self._end(row, keep=keep, known=known)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), length=st.integers(1, LONGEST))
    def withdraw(self, data: st.DataObject, length: int) -> None:
        """Withdraw a part of a row's text: no match finds a page of it, and rows go on with their own."""
        row = data.draw(st.sampled_from(self.rows))
        text = row.tokens[:length]
        self.manager.withdraw(row.salt, array(text))
        match = self.manager.match(row.salt, array([*text, 0]), len(text))
        assert match.resume.full_to < self.layout.page_size
        self.texts = [(salt, one) for salt, one in self.texts if salt != row.salt or not shared(one, text)]

    @rule()
    def evict_ahead(self) -> None:
        """Evict between two steps: what free and evictable memory there is stays the same."""
        before = self.manager.available_slots
        self.manager.evict_ahead()
        assert self.manager.available_slots == before
        assert not self.manager.moves

    @rule()
    def flush(self) -> None:
        self.manager.flush()
        self.texts.clear()
        self.written.clear()

    @rule()
    def settle(self) -> None:
        self.manager.compact()
        self.memory.move(self.manager)

    @invariant()
    def laws_hold(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check((row.lease, row.launched) for row in self.rows)
            self.followed.check()

    def teardown(self) -> None:
        """End all rows: every page is then free or evictable, and free after eviction."""
        if not hasattr(self, "manager"):
            return
        event(f"hits: {min(self.hits, 3)}, copies: {min(self.copies, 2)}, replays: {min(self.replays, 2)}")
        prefix = self.manager.prefix
        event(f"evictions by {type(prefix.policy).__name__}: {min(prefix.retention.evictions, 3)}")
        for row in list(self.rows):
            self._end(row, keep=True)
        self.manager.check([])
        pool = self.manager.pool
        assert pool.free_slots + pool.evictable_slots == pool.total_slots
        assert self.manager.make_room(pool.total_slots), "some cached pages cannot be evicted"
        self.manager.check([])
        assert pool.free_slots == pool.total_slots
        assert not self.manager.prefix.tree.roots
        self.followed.check()
        assert not self.followed.subscriber.held

    def _run(self, row: Row, end: int) -> bool:
        if not self.manager.grow(row.lease, end):
            return False
        self.memory.move(self.manager)
        self.memory.write(row, end)
        row.launched = end
        self.manager.slide(row.lease, end)
        return True

    def _end(self, row: Row, *, keep: bool, known: int | None = None) -> None:
        tokens = row.tokens[: row.launched if known is None else known] if keep else []
        self.manager.close(row.lease, array(tokens), prompt=row.start)
        self.rows.remove(row)
        self.written.append((row.salt, row.tokens[: row.launched]))
        if tokens:
            self.texts.append((row.salt, tokens))

    def _check_start(self, match: PrefixMatch, salt: str, tokens: list[int]) -> None:
        """Check where the row starts: by the start rule, and by the texts that the dictionary says are cached."""
        at, page, reach = match.resume, self.layout.page_size, self.layout.reach
        known = [text for own, text in self.written if own == salt] + [r.tokens for r in self.rows if r.salt == salt]
        longest = max((shared(text, tokens[:-1]) for text in known), default=0)
        assert at.full_to <= longest, "the cache has a text that no row has written"
        assert at.start <= at.full_to <= len(tokens) - 1
        least = 0
        if reach is None:
            least = at.full_to
        else:
            least = replay_start(self.layout, at.full_to)
            assert at.exact_from <= first_seen(reach, at.full_to) or at.start == at.boundary
        assert at.start >= least, "a missing window prevents the hit"
        if self.roomy:
            kept = max((shared(text, tokens[:-1]) for own, text in self.texts if own == salt), default=0)
            whole = kept // page * page
            if self.layout.full is not None:
                assert at.full_to >= whole, "a cached text is not found"
                if reach is None:
                    assert at.full_to >= kept - max(0, page // 8 - 1), "the hit ends before the last cached token"


def array(tokens: list[int]) -> Int[np.ndarray, " T"]:
    """Return token ids in the type that the cache takes."""
    return np.array(tokens, np.int32)


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [(k, "sliding") for k in LAYOUTS]
    + [(k, chunks) for chunks in ("chunked", "looking back") for k in LAYOUTS if k != "full only"],
)
def test_the_cache_finds_what_was_published_and_nothing_else(kind: str, shapes: str) -> None:
    """Right pages, exact windows, the start rule and no leak while pages are shared, copied, evicted and withdrawn."""
    machine = type("Machine", (PrefixMachine,), {"layers": LAYOUTS[kind], "shapes": SHAPES[shapes]})
    run_state_machine_as_test(machine, settings=share(8))


def test_rows_that_start_inside_a_page_without_cached_pages_fit_the_packed_plan() -> None:
    """A window of one token reads nothing of a known text: a row of 2 tokens may need 2 pages, one of 22 seven."""
    talk = make_conversation((0, 1), Reach(1), Limits(120, 2, 24, 4, num_slabs=61))
    text = [(3 * at * at + at) % 13 for at in range(31)]
    together: list[list[list[int]]] = [[[]], [[5] * 2, [7] * 40]]
    for tails in together:
        for more in tails:
            assert talk.add([*text, *more], 3, set())
        while talk.scheduler.has_work():
            talk.step()
    assert talk.scheduler.cache.stats().cached_tokens == 62
