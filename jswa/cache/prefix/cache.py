"""The prefix cache: matches texts, publishes what rows have computed, and withdraws it.

A row publishes its text as it is computed: after each prefill chunk the whole pages, at the end of the prompt and of
the row also the last, partly filled page. The tree then owns these pages beside the row. The row may go on writing to
a partly filled page: behind the published tokens, where no other row reads.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, get_args

import numpy as np
from jaxtyping import Int

from jswa.cache.layout import KVLayout
from jswa.cache.lease import Lease
from jswa.cache.pool import PagePool
from jswa.cache.prefix.edges import BRANCH, PROMPT_END, Cursor, Ghost, Node, Window
from jswa.cache.prefix.policy import Policy
from jswa.cache.prefix.radix import NO_PAGES, NONE, RadixTree, common_prefix
from jswa.cache.prefix.resume import COLD, Resume, resume
from jswa.cache.prefix.retention import Retention
from jswa.cache.prefix.stats import CacheStats, HitCounter
from jswa.kv_events.journal import Cleared
from jswa.types import MissReason

_FIRST_PAGES = 65_536  # texts whose salt is remembered


class PrefixMatch(NamedTuple):
    """The cached part of a text. Valid until the next change of cache or pool.

    Attributes:
        path: edges of the tree that agree with the text.
        resume: where a row would start.
        full: ids of the full pages of [0, full_to).
        local: ids of the local pages of [resume.local_visible_from, resume.boundary).
        branch: whether the tree has another continuation where the match ends.
        reason: why the match is no longer.
        text: tokens that agree with the path.
        ghost: what was evicted behind them.
    """

    path: tuple[Node, ...]
    resume: Resume
    full: Int[np.ndarray, " pages"]
    local: Int[np.ndarray, " pages"]
    branch: bool
    reason: MissReason
    text: int = 0
    ghost: Ghost | None = None


NO_MATCH = PrefixMatch((), COLD, NO_PAGES, NO_PAGES, branch=False, reason="cold")
_NO_MATCHES: dict[MissReason, PrefixMatch] = {r: NO_MATCH._replace(reason=r) for r in get_args(MissReason)}


def window_ends(match: PrefixMatch, length: int, page: int, interval: int | None) -> list[int]:
    """Return where the windows end that a row keeps: where texts diverge, at intervals, and where its text ends.

    Also where the match ends inside a page that kept windows need: the row keeps its fuller copy until it is published
    in place of that page, even if the copy leaves the row's window before. Without it these windows would be lost
    (`Retention.replace_partial`).

    Args:
        length: tokens that are known when the row begins; no window ends if the match has them all.
    """
    found = match.resume.full_to
    if length <= found:
        return []
    if not match.path and interval is None:
        return [length]
    first = found // page * page
    replaces = first < found and any(end > first for end in match.path[-1].windows)
    regular = range(found // interval * interval + interval, length, interval) if interval is not None else ()
    return [*([found] if found and (match.branch or replaces) else []), *regular, length]


class PrefixCache:
    """Owns the tree, its retention and its policy. Only the cache manager calls it; the manager owns the leases."""

    def __init__(self, layout: KVLayout, pool: PagePool, policy: Callable[[RadixTree], Policy]) -> None:
        self.layout = layout
        self.pool = pool
        self.tree = RadixTree(layout, pool)
        self.policy = policy(self.tree)
        self.retention = Retention(self.tree, self.policy)
        self._page = layout.page_size
        # Copying a page costs more than computing a few tokens.
        self._least_copy = max(1, self._page // 8)
        self._salt_of: dict[bytes, str | None] = {}  # by first page of text; None: seen under several

    def match(self, salt: str, tokens: Int[np.ndarray, " T"], limit: int) -> PrefixMatch:
        """Return the cached part of the first `limit` tokens of a text. Changes nothing."""
        p = self._page
        path, text = self.tree.walk(salt, tokens[: max(limit, 0)])
        ghost = self.tree.ghosts.find(salt, tokens, text)
        reason = self._reason(salt, tokens, text, ghost)
        if not path:
            return _NO_MATCHES[reason] if ghost is None else _NO_MATCHES[reason]._replace(ghost=ghost)
        full, local = self.tree.pages(path, text)
        full_to, live = text, local != NONE
        if self.layout.full is not None and np.count_nonzero(full) < len(full):
            full_to = int(full.argmin()) * p  # the first hole
        found = resume(self.layout, full_to, live)
        if full_to % p and found.start - full_to // p * p < self._least_copy:
            coarse = resume(self.layout, full_to // p * p, live)
            found = found if found.start - coarse.start >= self._least_copy else coarse
        window = slice(
            found.local_visible_from // p, -(-found.boundary // p) if found.boundary > found.local_visible_from else 0
        )
        return PrefixMatch(
            tuple(path),
            found,
            full[: -(-found.full_to // p) if self.layout.full is not None else 0],
            local[window],
            branch=bool(path) and self._parts(path[-1], text, tokens),
            reason=reason,
            text=text,
            ghost=ghost,
        )

    def _parts(self, node: Node, at: int, tokens: Int[np.ndarray, " T"]) -> bool:
        """Return whether an edge that agrees with a text up to `at` goes on there, and not as the text does.

        A text that is cached as a whole does not part from itself where its match ends, one token before its end.
        """
        if at >= len(tokens):
            return False
        if at < node.end:
            return bool(tokens[at] != node.tokens[at - node.start])
        return bool(node.children) and int(tokens[at]) not in node.children

    def start(self, lease: Lease, match: PrefixMatch) -> None:
        """Count the use of a match by a new row, and place the row's cursor."""
        page = (match.resume.boundary - 1) // self._page
        self.visit(match.path, match.text, match.ghost)
        if len(match.local):
            ending = (w for node in match.path for end, w in node.windows.items() if (end - 1) // self._page == page)
            window = next(ending, None)
            if window is not None:
                window.last = self.tree.clock
                window.hits += 1
        node = match.path[-1] if match.path else self.tree.root(lease.salt)
        # At the start, not at the end of the match: local pages that the row computes again may fill holes of the tree.
        self.attach(lease.cursor, node, match.resume.start // self._page * self._page)

    def visit(self, path: Sequence[Node], text: int, ghost: Ghost | None, found: int = 0) -> None:
        """Count the start of a row whose text agrees with a path up to `text`, and with a ghost beyond.

        `found`: how much of it another tree has, on whose pages the row starts.
        """
        tree = self.tree
        tree.clock += 1
        if ghost is not None and (last_use := tree.ghosts.pop(ghost)) is not None:
            last, kind = last_use
            self.policy.outcome(tree.clock - last, kind, used=True)
        self.policy.started(path, text, found)
        if path:
            path[-1].hits += 1

    def publish(self, lease: Lease, tokens: Int[np.ndarray, " T"], upto: int, *, final: bool = False) -> None:
        """Publish the text of a row from its cursor to `upto`.

        `upto` is page aligned, or the end of the prompt, or, if `final`, the end of the row. If the tree has other full
        pages for the text, the cursor is detached, and the row publishes the rest when it ends.
        """
        node, at = lease.cursor.node, lease.cursor.published
        assert node is not None
        if at < self._page <= upto:
            self._note_salt(lease.salt, tokens)
        while at < upto:
            agree = common_prefix(node.tokens[at - node.start :], tokens[at:upto])
            if agree:
                if not final and (own := self._own_until(node, lease, at, at + agree)) < at + agree:
                    lease.cursor.detached, at = True, own
                    break
                self._adopt(node, lease, at, at + agree)
                at += agree
                continue
            if at < node.end:
                node = self.tree.split(node, at)
            child = node.children.get(int(tokens[at]))
            if child is None:
                node, at = self._append(node, lease, tokens[at:upto]), upto
            else:
                node = child
        self.attach(lease.cursor, node, at)

    def keep_windows(self, lease: Lease) -> None:
        """Keep the windows at the lease's window ends, as far as it is published."""
        cursor = lease.cursor
        assert cursor.node is not None
        while lease.window_ends and lease.window_ends[0] <= cursor.published:
            end = lease.window_ends.pop(0)
            place = BRANCH if lease.window_ends else PROMPT_END
            self.retention.add_window(cursor.node, end, place, branch=end == lease.branch_at)

    def end_turn(self, lease: Lease, prompt: int, end: int) -> None:
        """Note where the next turn may go on: at the ends of prompt and text, or where earlier turns ended."""
        assert lease.cursor.node is not None
        self.policy.ended(lease.cursor.node, lease.cursor.published, prompt, end)

    def withdraw(self, salt: str, tokens: Int[np.ndarray, " T"]) -> None:
        """Remove a text, with everything that continues it or a part of it."""
        path, _ = self.tree.walk(salt, tokens)
        if path:
            # Above the first edge with a whole page there are no pages of this text: each lower edge has its own.
            self._remove(next((node for node in path if node.end >= self._page), path[-1]))

    def flush(self) -> None:
        """Remove everything. Rows keep their pages."""
        if self.tree.notes is not None:
            self.tree.notes.journal.put(Cleared())
        for root in list(self.tree.roots.values()):
            for child in list(root.children.values()):
                self._remove(child)
            self.retention.trim(root)
        self._salt_of.clear()

    def detach(self, cursor: Cursor) -> None:
        """Take the cursor of an ended row off the tree, and trim edges that only the cursor kept."""
        node = cursor.node
        if node is not None:
            node.cursors.discard(cursor)
            cursor.node = None
            self.retention.trim(node)

    def stats(self, hits: HitCounter, slid_pages: int) -> CacheStats:
        """Return these counters and the contents of the cache."""
        pool = self.pool
        return CacheStats(
            **{**vars(hits), "missed": dict(hits.missed)},
            full_pages=int(np.count_nonzero(pool.full_cached)),
            local_pages=int(np.count_nonzero(pool.local_cached)),
            evictable_full_pages=pool.evictable_full,
            evictable_local_pages=pool.evictable_local,
            windows=sum(isinstance(item, Window) for item in self.tree.candidates.items),
            evictions=self.retention.evictions,
            slid_pages=slid_pages,
        )

    def check(self) -> None:
        """Assert the laws of tree and retention."""
        self.tree.check()
        self.retention.check()

    def _remove(self, top: Node) -> None:
        """Remove an edge and all edges below it; cursors there are detached and move to the edge above."""
        nodes = [top]
        for node in nodes:
            nodes.extend(node.children.values())
        above = top.parent
        assert above is not None
        aligned = above.end // self._page * self._page
        for node in reversed(nodes):
            for cursor in list(node.cursors):
                cursor.detached = True
                self.attach(cursor, above, min(aligned, cursor.published))
            self.retention.clear(node, 0)
            self.tree.candidates.discard(node)
        self.tree.detach(top)
        self.retention.trim(above)

    def attach(self, cursor: Cursor, node: Node, published: int) -> None:
        """Move a cursor to position `published` on the path from the root to the end of `node`."""
        while node.parent is not None and published <= node.start:
            node = node.parent
        if cursor.node is not None:
            cursor.node.cursors.discard(cursor)
        cursor.node, cursor.published = node, published
        node.cursors.add(cursor)

    def _own_until(self, node: Node, lease: Lease, at: int, to: int) -> int:
        """Return the first position in [at, to) whose whole page on the edge is not the lease's own, or `to`."""
        if self.layout.full is None:
            return to
        base, low, high = node.start // self._page, max(node.start, at) // self._page, to // self._page
        other = (node.full[low - base : high - base] != lease.full.ids[low:high]).nonzero()[0]
        return (low + int(other[0])) * self._page if len(other) else to

    def _exact_pages(self, lease: Lease, low: int, high: int) -> tuple[int, int]:
        """Return the page positions within [low, high) at which the lease has a local page that may be shared."""
        exact = -(-lease.exact_from // self._page)
        return max(low, lease.unpublished, exact), min(high, lease.local.end)

    def _adopt(self, node: Node, lease: Lease, at: int, to: int) -> None:
        """Fill holes of an edge with local pages of a lease that has the same text."""
        base = node.start // self._page
        low, high = self._exact_pages(lease, max(node.start, at) // self._page, to // self._page)
        if low < high:
            ids = lease.local.ids[low:high]
            hole = node.local[low - base : high - base] == NONE
            missing = (hole & (ids != NONE) & ~self.pool.local_cached[ids]).nonzero()[0]
            if len(missing):
                self.tree.adopt_local(node, missing + (low - base), ids[missing])

    def _append(self, node: Node, lease: Lease, tokens: Int[np.ndarray, " n"]) -> Node:
        """Append text of a lease, with its pages, to an edge."""
        end, p = node.end, self._page
        first, last = end // p, -(-(end + len(tokens)) // p)
        full, local = np.zeros(last - first, np.intp), np.zeros(last - first, np.intp)
        if self.layout.full is not None:
            full[:] = lease.full.ids[first:last]
        low, high = self._exact_pages(lease, first, last)
        if low < high:
            local[low - first : high - first] = lease.local.ids[low:high]
        if end % p and node.parent is not None and not node.children:
            if lease.cursor.node is node and lease.cursor.published == end and node.local[-1] == lease.local.ids[first]:
                # The tree has this lease's own page, which is fuller by now; it may have left the lease's window.
                local[0] = node.local[-1]
            self.retention.replace_partial(node, first, int(local[0]))
            if node.full[-1] != full[0]:
                self.tree.drop_full(node, slice(len(node.full) - 1, None))
        self.policy.appended(node)
        fresh = self.tree.append(node, tokens.copy(), full, local)
        self.tree.use(fresh)
        return fresh

    def _reason(self, salt: str, tokens: Int[np.ndarray, " T"], text: int, ghost: Ghost | None) -> MissReason:
        if len(tokens) <= self._least_copy:
            return "too short"
        if ghost is not None:
            return "evicted"
        if text < self._page and self._salt_of.get(tokens[: self._page].tobytes(), salt) != salt:
            return "salt"
        return "cold"

    def _note_salt(self, salt: str, tokens: Int[np.ndarray, " T"]) -> None:
        """Remember under which salt a text was seen, by its first page: a search of all trees would cost O(tenants)."""
        first = tokens[: self._page].tobytes()
        self._salt_of[first] = salt if self._salt_of.get(first, salt) == salt else None
        if len(self._salt_of) > _FIRST_PAGES:
            del self._salt_of[next(iter(self._salt_of))]
