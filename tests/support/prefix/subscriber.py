"""A router that follows the events about cached KV, and what it must know then."""

from typing import Any

import msgspec

from jswa.building.kv_events import note, spec_of
from jswa.cache.keys import parts_of
from jswa.cache.prefix.notes import text_between
from jswa.cache.prefix.radix import RadixTree
from jswa.kv_events.blocks import Blocks
from jswa.kv_events.journal import Journal, Medium
from jswa.kv_events.publisher import encode

Place = tuple[str, int, int]
Text = tuple[str, tuple[int, ...]]  # salt and tokens


class Subscriber:
    """Knows which blocks are cached by the events only; each event must change what it knows.

    Attributes:
        held: medium, group and digest of the cached blocks.
        texts: the text from its start to the end of a block, by digest.
        groups: name and window of the attention, by group.
        knows_parents: whether all blocks before a block have been announced. Without full layers, pages that slid out
            of a window before they were published never are.
    """

    def __init__(self, *, knows_parents: bool = True) -> None:
        self.held: set[Place] = set()
        self.texts: dict[int, Text] = {}
        self.groups: dict[int, tuple[str, int | None]] = {}
        self.knows_parents = knows_parents

    def apply(self, event: dict[str, Any]) -> None:
        """Follow one event."""
        match event["type"]:
            case "AllBlocksCleared":
                self.held.clear()
            case "BlockRemoved":
                gone = {(event["medium"], event["group_idx"], one) for one in event["block_hashes"]}
                assert gone <= self.held, "a block left that was not there"
                self.held -= gone
            case "BlockStored":
                self._stored(event)
            case other:
                raise AssertionError(f"unknown event {other}")

    def _stored(self, event: dict[str, Any]) -> None:
        size, hashes, parent = event["block_size"], event["block_hashes"], event["parent_block_hash"]
        assert len(event["token_ids"]) == size * len(hashes) > 0
        places = {(event["medium"], event["group_idx"], block) for block in hashes}
        assert len(places) == len(hashes)
        assert not places & self.held, "a block came that was there"
        self.held |= places
        self.groups[event["group_idx"]] = event["kv_cache_spec_kind"], event.get("kv_cache_spec_sliding_window")
        keys = event.get("extra_keys") or [None] * len(hashes)
        assert len(keys) == len(hashes)
        if parent is not None and parent not in self.texts:
            assert not self.knows_parents, "a block continues one that was never announced"
            return
        salt, tokens = ("".join(keys[0] or ()), ()) if parent is None else self.texts[parent]
        for index, block in enumerate(hashes):
            tokens = (*tokens, *event["token_ids"][index * size : (index + 1) * size])
            assert self.texts.setdefault(block, (salt, tokens)) == (salt, tokens), "two texts have one digest"


class Followed:
    """A tree, and a subscriber that follows it: its local pages too, if `windows`, or if it has no others."""

    def __init__(self, tree: RadixTree, medium: Medium = "GPU", *, windows: bool = True) -> None:
        self.tree, self.medium = tree, medium
        self.subscriber = Subscriber(knows_parents=tree.layout.full is not None)
        self.journal, spec = Journal(1_000_000), spec_of(tree.layout, windows=windows)
        self.kinds = spec.keys()
        self.blocks = Blocks(tree.page_size, spec, dict, parts_of)
        note(tree, self.journal, medium, spec)

    def check(self) -> None:
        """Assert that the subscriber knows exactly the whole pages of the tree, and the text of each."""
        while changes := self.journal.take(1000, 0):
            for event in self.blocks.events(changes):
                self.subscriber.apply(msgspec.msgpack.decode(encode(event)))
        there = self._whole_pages()
        assert self.subscriber.held == there.keys()
        for (_, _, block), text in there.items():
            assert self.subscriber.texts.get(block, text) == text

    def _whole_pages(self) -> dict[Place, Text]:
        found: dict[Place, Text] = {}
        page = self.tree.page_size
        for node in self.tree.nodes():
            text = text_between(node, 0, node.end)
            digests, salt = self.blocks.digests(node.salt, text), parts_of(node.salt)[2]
            for group, (kind, ids) in enumerate((("full", node.full), ("local", node.local))):
                if kind not in self.kinds:
                    continue
                for place, one in enumerate(ids.tolist(), node.start // page):
                    if one and place < len(digests):
                        found[self.medium, group, digests[place]] = salt, tuple(text[: (place + 1) * page].tolist())
        return found
