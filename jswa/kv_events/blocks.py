"""vLLM's events about cached blocks, made from the notes of a journal.

The tokens of an event are an array, which the publisher writes as a list: a list of Python integers costs as much as
all else.

A block is a whole page of tokens. Its digest continues that of the block before, so equal digests mean equal texts from
the start, under the same salt and adapter, in every engine with the same block size. The form of the messages is that
of vLLM 0.33 (distributed/kv_events.py; PR 42892 made its events maps).
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, assert_never

import numpy as np
from jaxtyping import Int

from jswa.kv_events.journal import Change, Cleared, Kind, Medium, Moved, Removed, Stored

Event = dict[str, Any]
_GROUPS: dict[Kind, int] = {"full": 0, "local": 1}


class Blocks:
    """Owns the digests of the blocks that were announced.

    Args:
        page: tokens of a block.
        spec: by kind of page that is announced, vLLM's name for its attention, and its window or chunk in tokens;
            None: no window.
        names: returns the digests of the loaded adapters by name.
        root: returns version, digest of the adapter, and salt of a tree's key.
    """

    def __init__(
        self,
        page: int,
        spec: Mapping[Kind, tuple[str, int | None]],
        names: Callable[[], Mapping[str, str]],
        root: Callable[[str], tuple[int, str | None, str]],
    ) -> None:
        self._page, self._spec, self._names, self._root = page, spec, names, root
        self._version = 0  # of the weights
        self._digests: dict[tuple[Medium, Kind], dict[int, int]] = {}

    @property
    def announced(self) -> dict[tuple[Medium, Kind], set[int]]:
        """The digests that subscribers believe to be cached."""
        return {place: set(found.values()) for place, found in self._digests.items() if found}

    def events(self, changes: Iterable[Change]) -> Iterator[Event]:
        """Yield the events of changes, in order."""
        for change in changes:
            match change:
                case Stored():
                    yield from self._stored(change)
                case Removed():
                    yield from self._removed(change)
                case Moved(medium, source, target):
                    table = self._digests.get((medium, "full"), {})
                    if source in table:
                        table[target] = table.pop(source)
                case Cleared():
                    yield self._cleared()
                case _:
                    assert_never(change)

    def digests(self, key: str, text: Int[np.ndarray, " T"]) -> list[int]:
        """Return the digests of the whole blocks of a text in the tree of a key."""
        _, adapter, salt = self._root(key)
        return self._chain(_seed(adapter, salt), text[: len(text) // self._page * self._page])

    def _cleared(self) -> Event:
        self._digests.clear()
        return {"type": "AllBlocksCleared"}

    def _stored(self, change: Stored) -> Iterator[Event]:
        version, adapter, salt = self._root(change.key)
        if version < self._version:
            return  # a row that began with earlier weights: no later request can use its text
        if version > self._version:
            self._version = version
            yield self._cleared()
        if change.before is not None:
            parent = self._digests[change.medium, change.before[0]][change.before[1]]
        else:
            parent = [_seed(adapter, salt), *self._chain(_seed(adapter, salt), change.text)][-1]
        chain = [parent, *self._chain(parent, change.tokens)]
        begins = change.before is None and not len(change.text)
        name = None if adapter is None else next((n for n, own in self._names().items() if own == adapter), adapter)
        for kind in self._spec:
            table = self._digests.setdefault((change.medium, kind), {})
            for first, ids in _runs(getattr(change, kind).tolist()):
                digests = chain[first + 1 : first + 1 + len(ids)]
                table.update(zip(ids, digests, strict=True))
                starts = begins and not first
                tokens = change.tokens[first * self._page : (first + len(ids)) * self._page]
                event = {
                    "type": "BlockStored",
                    "block_hashes": digests,
                    "parent_block_hash": None if starts else chain[first],
                    "token_ids": tokens,
                    "block_size": self._page,
                    "lora_id": None,
                    "medium": change.medium,
                    "lora_name": name,
                }
                yield event | self._described(kind, len(ids), name, salt if starts else None)

    def _described(self, kind: Kind, blocks: int, name: str | None, salt: str | None) -> Event:
        """Return the optional fields of stored blocks that are not None: vLLM leaves out the others."""
        attention, window = self._spec[kind]
        found: Event = {"group_idx": _GROUPS[kind], "kv_cache_spec_kind": attention}
        if window is not None:
            found["kv_cache_spec_sliding_window"] = window
        first, later = tuple(one for one in (name, salt) if one), (name,) if name else ()
        if first:
            found["extra_keys"] = [first, *[later or None] * (blocks - 1)]
        return found

    def _removed(self, change: Removed) -> Iterator[Event]:
        table = self._digests.get((change.medium, change.kind), {})
        digests = [table.pop(page) for page in change.ids.tolist() if page in table]
        if digests:
            group = _GROUPS[change.kind]
            yield {"type": "BlockRemoved", "block_hashes": digests, "medium": change.medium, "group_idx": group}

    def _chain(self, digest: int, tokens: Int[np.ndarray, " n"]) -> list[int]:
        """Return the digests of successive blocks."""
        found = []
        for block in np.ascontiguousarray(tokens, np.int32).reshape(-1, self._page):
            digest = _digest(digest, block.tobytes())
            found.append(digest)
        return found


def _seed(adapter: str | None, salt: str) -> int:
    return _digest(None, f"{adapter or ''}\0{salt}".encode(errors="surrogatepass"))


def _digest(before: int | None, data: bytes) -> int:
    parent = b"" if before is None else before.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(parent + data, digest_size=8).digest(), "little")


def _runs(ids: list[int]) -> list[tuple[int, list[int]]]:
    """Return the runs of ids that are not 0, each with the place of its first."""
    found: list[tuple[int, list[int]]] = []
    before = 0
    for place, page in enumerate(ids):
        if page and before:
            found[-1][1].append(page)
        elif page:
            found.append((place, [page]))
        before = page
    return found
