"""Host memory behind the prefix cache: a second prefix cache, of the same slots, for pages that the device evicts.

A text is copied here when the device evicts a part of it that is not here yet, with the windows that go with it, and
stays when the device has it again: it is copied once, however often it comes and goes. Its prefix is always here too,
so the laws of the tree hold here as they do there. What is evicted from here is chosen as on the device.

The contents are copied by whoever drains `transfers`; a page whose contents have not arrived is not found. A copy that
fails empties this cache: a miss, never a wrong page.
"""

from collections import deque

import numpy as np
from jaxtyping import Bool, Int, Shaped

from jswa.cache.host.texts import Pages, Taken, add_places, pages_of, path_to, places_of, take, text_of
from jswa.cache.moves import Move, origins, rename
from jswa.cache.pool import PagePool
from jswa.cache.prefix.cache import PrefixCache
from jswa.cache.prefix.edges import Node, Window
from jswa.cache.prefix.radix import NONE
from jswa.config import HostMemory
from jswa.plan import Write

Row = tuple[list[Shaped[np.ndarray, "_ _"]], int]  # arrays by lane and device, and a row of them
Kept = tuple[str, Int[np.ndarray, " T"], int]  # salt and tokens of a text, number of the batch of its contents


class HostTier:
    """Owns the pages in host memory. `copied`: slots that were copied to it so far. `kept`: texts that were copied.

    Args:
        device: the prefix cache on the device.
        moves: its manager's moves that wait for the next plan.
    """

    def __init__(self, device: PrefixCache, memory: HostMemory) -> None:
        self.pool = PagePool(memory.slabs, device.layout.pages_per_slab)
        self.prefix = PrefixCache(device.layout, self.pool, device.policy.beside)
        self.copied = 0
        self.kept: deque[Kept] = deque(maxlen=0)
        self.reading: list[Pages] = []  # pages of this pool that others hold
        self._device = device
        self._moves: list[tuple[int, int]] = []
        self._downloads: dict[int, int] = {}  # by slot here: the slot of the device
        self._writes: dict[int, Row] = {}  # by slot: the row that comes from the disk
        # By slot: the number of the batch of downloads that brings its contents.
        self._batch = np.zeros(memory.slabs * self.pool.pages_per_slab, np.int64)
        self._drained = self._arrived = 0

    def keep(self, item: Node | Window, moves: list[Move]) -> None:
        """Copy pages that the device is about to evict, of a window or a part of a leaf, unless they are here.

        A text that is longer than this memory is left out.

        Args:
            moves: of the device, which have not been carried out.
        """
        node, windows = (item, list(item.windows.values())) if isinstance(item, Node) else (item.node, [item])
        page, path = self.prefix.layout.page_size, path_to(node)
        tokens = text_of(path, item.end, page)
        source = pages_of(self._device.tree, path, len(tokens), len(tokens))
        wanted = np.zeros(len(source.full), bool)
        for window in windows:
            last = -(-window.end // page)
            wanted[last - len(window.slabs) : last] = True
            source.local[last - len(window.slabs) : last] = window.slabs
        if self.prefix.layout.full is not None and not source.full.all():
            return  # a row has just lost the end of the text
        numbers = Pages(source.full, self.pool.pages_per_slab * source.local)
        taken = take(self.prefix, node.salt, tokens, numbers, wanted, self._follow_moves, evict=True)
        if taken is None:
            return
        since = self.prefix.tree.clock - self._device.tree.clock
        add_places(taken.node, places_of(path, len(tokens)))
        if len(taken.slots):
            self.kept.append((node.salt, tokens, self._drained + 1))
            taken.node.last, taken.node.kind = node.last + since, node.kind
            self.prefix.tree.candidates.refresh(taken.node)
        for window in windows:
            if window.end <= len(tokens):
                self.prefix.retention.add_window(
                    taken.node, window.end, branch=window.branch, last_use=window.last + since, hits=window.hits
                )
        self._download(taken, moves)
        self.prefix.detach(taken.cursor)

    def take(self, salt: str, tokens: Int[np.ndarray, " T"], source: Pages, rows: list[Row], boundary: int = 0) -> bool:
        """Publish a text with pages from elsewhere, as far as it is not here; False, and no change, if it cannot be.

        Args:
            source: by page position the number of a page's first row in `rows`, from 1 on.
            boundary: end of a window to keep; 0: none.
        """
        taken = take(self.prefix, salt, tokens, source, source.local != NONE, self._follow_moves, evict=True)
        if taken is None:
            return False
        for slot, number in zip(taken.slots.tolist(), taken.sources.tolist(), strict=True):
            self._writes[slot] = rows[number - 1]
            self._downloads.pop(slot, None)
        self._batch[taken.slots] = 0
        if boundary:
            self.prefix.retention.add_window(taken.node, boundary)
        self.prefix.detach(taken.cursor)
        return True

    def visit(self, salt: str, tokens: Int[np.ndarray, " T"], found: int) -> None:
        """Count a row that starts with a text: its pages here are used, even if the row found them on the device.

        `found`: tokens that the device has: a text without a useful window does not come back.
        """
        path, text = self.prefix.tree.walk(salt, tokens)
        self.prefix.visit(path, text, self.prefix.tree.ghosts.find(salt, tokens, text), found)

    def end_turn(self, salt: str, tokens: Int[np.ndarray, " T"], prompt: int) -> None:
        """Note that a row has ended, the first `prompt` of whose tokens were its prompt, as the device's cache does."""
        path, text = self.prefix.tree.walk(salt, tokens)
        if path:
            self.prefix.policy.ended(path[-1], text, prompt, len(tokens))

    def arrived(self, pages: Pages) -> tuple[Bool[np.ndarray, " n"], Bool[np.ndarray, " n"]]:
        """Return by page position whether the contents of full and local pages are there; False where no page is."""
        m = self.pool.pages_per_slab
        full = (pages.full != NONE) & (self._batch[pages.full] <= self._arrived)
        first = pages.local.astype(np.intp) * m
        local = (pages.local != NONE) & (self._batch[first[:, None] + np.arange(m)] <= self._arrived).all(axis=1)
        return full, local

    def landed(self, batch: int) -> bool:
        """Return whether a batch has arrived."""
        return batch <= self._arrived

    def drain(self) -> tuple[Int[np.ndarray, "M 2"], Int[np.ndarray, "D 2"], tuple[Write, ...]]:
        """Return the moves within this memory, the downloads, and the writes from the disk, to be carried out now.

        If there are downloads, they are one batch: `land` takes the batches in the order in which they were drained.
        """
        moves, downloads = self._moves, [(source, target) for target, source in self._downloads.items()]
        self._moves, self._downloads = [], {}
        self._drained += bool(downloads)
        groups: dict[int, list[tuple[int, Row]]] = {}
        for slot, row in self._writes.items():
            groups.setdefault(id(row[0]), []).append((slot, row))
        self._writes = {}
        writes = tuple(
            Write(np.array([slot for slot, _ in group]), group[0][1][0], np.array([row for _, (_, row) in group]))
            for group in groups.values()
        )
        return np.array(moves, np.int32).reshape(-1, 2), np.array(downloads, np.int32).reshape(-1, 2), writes

    def flush(self) -> None:
        """Forget all texts, and the copies that have not begun."""
        self.prefix.flush()
        self._downloads = {}
        self._writes = {}
        self.kept.clear()

    def land(self, batches: int) -> None:
        """Note that so many more batches of downloads have arrived."""
        self._arrived += batches
        assert self._arrived <= self._drained

    def check(self) -> None:
        """Assert the laws of pool and tree, and that only the tree and `reading` own pages."""
        self.pool.check()
        self.prefix.check()
        for kind in ("full", "local"):
            owners = getattr(self.pool, f"{kind}_cached").astype(np.int32)
            for pages in self.reading:
                np.add.at(owners, getattr(pages, kind), getattr(pages, kind) != NONE)
            assert np.array_equal(owners, getattr(self.pool, f"{kind}_owners")), f"owners of {kind} pages on the host"

    def _download(self, taken: Taken, moves: list[Move]) -> None:
        """Note the copies of the pages that the tree has taken."""
        for slot, origin in zip(taken.slots.tolist(), origins(moves, taken.sources).tolist(), strict=True):
            self._downloads[slot] = origin
            self._writes.pop(slot, None)
        self._batch[taken.slots] = self._drained + 1
        self.copied += len(taken.slots)

    def _follow_moves(self) -> None:
        """Follow the full pages that the pool has moved: their contents move before the next downloads."""
        for source, target in self.pool.drain_moves():
            self.prefix.tree.rename(source, target)
            for pages in self.reading:
                pages.rename(source, target)
            self._moves.append((source, target))
            rename(self._downloads, source, target)
            rename(self._writes, source, target)
            self._batch[target] = self._batch[source]
