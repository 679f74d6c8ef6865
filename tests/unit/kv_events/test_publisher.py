"""The messages of the publisher, read as vLLM's subscribers read them."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from jswa.errors import ConfigError
from jswa.kv_events.blocks import Blocks
from jswa.kv_events.journal import Cleared, Journal, Removed, Stored
from jswa.kv_events.options import KVEventsConfig
from jswa.kv_events.publisher import Publisher

NO_TEXT = np.zeros(0, np.int32)
TOKENS = np.arange(8, dtype=np.int32)


class Setup:
    """A publisher on two local sockets, a subscriber and a client that asks for earlier batches."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.addresses = [f"ipc://{folder}/{name}" for name in ("events", "replay")]
        self.journal = Journal(1000)
        self.blocks = Blocks(4, {"full": ("full_attention", None)}, lambda: {"mine": "abc"}, lambda key: (0, None, key))
        self.publisher = Publisher(
            KVEventsConfig(self.addresses[0], self.addresses[1], **config), self.journal, self.blocks
        )
        self.context = zmq.Context()
        self.sub, self.ask = self.context.socket(zmq.SUB), self.context.socket(zmq.REQ)
        self.sub.connect(self.addresses[0])
        self.sub.setsockopt_string(zmq.SUBSCRIBE, config.get("topic", ""))
        self.sub.setsockopt(zmq.RCVTIMEO, 5000)
        self.ask.connect(self.addresses[1])
        self.ask.setsockopt(zmq.RCVTIMEO, 5000)

    def begin(self) -> None:
        """Send batches until the subscriber has one: a PUB socket loses what is sent before a subscription arrives."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            self.journal.put(Cleared())
            if self.sub.poll(50):
                break
        time.sleep(0.2)
        while self.sub.poll(50):
            self.sub.recv_multipart()

    def replay(self, first: int) -> list[tuple[bytes, int, bytes]]:
        """Return the batches from a number on, as a client of vLLM asks for them."""
        asking = self.context.socket(zmq.DEALER)
        asking.connect(self.addresses[1])
        asking.setsockopt(zmq.RCVTIMEO, 5000)
        asking.send_multipart([b"", first.to_bytes(8, "big")])
        found: list[tuple[bytes, int, bytes]] = []
        while True:
            empty, topic, number, batch = asking.recv_multipart()
            assert empty == b""
            if number == (-1).to_bytes(8, "big", signed=True):
                asking.close(0)
                return found
            found.append((topic, int.from_bytes(number, "big"), batch))

    def close(self) -> None:
        """End everything."""
        self.publisher.close()
        self.context.destroy(linger=0)


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    """Return a publisher with a topic."""
    setup = Setup(tmp_path, topic="kv-events")
    yield setup
    setup.close()


def stored(ids: list[int], key: str = "") -> Stored:
    """Return a note of two blocks at the start of a text."""
    return Stored("GPU", key, None, NO_TEXT, TOKENS, np.array(ids), np.zeros(2, int))


def test_a_batch_has_the_frames_and_fields_of_vllm(setup: Setup) -> None:
    """Topic, number and msgpack; events are maps with a type, and leave out what is None."""
    setup.begin()
    for note in (stored([5, 6], "salt"), Removed("GPU", "full", np.array([6, 99])), Cleared()):
        setup.journal.put(note)
    events: list[dict[str, Any]] = []
    numbers = []
    while len(events) < 3:
        topic, number, batch = setup.sub.recv_multipart()
        at, more, rank = msgspec.msgpack.decode(batch)
        assert (topic, rank) == (b"kv-events", 0)
        assert abs(at - time.time()) < 60
        numbers.append(int.from_bytes(number, "big"))
        events += more
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    block = events[0]["block_hashes"]
    assert events == [
        {
            "type": "BlockStored",
            "block_hashes": block,
            "parent_block_hash": None,
            "token_ids": TOKENS.tolist(),
            "block_size": 4,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [["salt"], None],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        },
        {"type": "BlockRemoved", "block_hashes": block[1:], "medium": "GPU", "group_idx": 0},
        {"type": "AllBlocksCleared"},
    ]
    assert all(0 <= one < 2**64 for one in block)


def test_earlier_batches_are_sent_again_from_a_number_on(setup: Setup) -> None:
    """With the same bytes; a request of another form is ignored."""
    setup.begin()
    setup.journal.put(stored([1, 2]))
    frames = setup.sub.recv_multipart()
    number = int.from_bytes(frames[1], "big")
    bad = setup.context.socket(zmq.DEALER)
    bad.connect(setup.addresses[1])
    bad.send_multipart([b"", b"short"])
    assert setup.replay(number) == [(b"kv-events", number, frames[2])]
    assert [one[1] for one in setup.replay(0)] == list(range(number + 1))
    assert setup.replay(number + 1) == []
    bad.close(0)


def test_only_the_last_batches_are_kept(tmp_path: Path) -> None:
    """`buffer_steps` of them."""
    setup = Setup(tmp_path, buffer_steps=2)
    setup.begin()
    for _ in range(5):
        setup.journal.put(Cleared())
        setup.sub.recv_multipart()
    assert len(setup.replay(0)) == 2
    setup.close()


def test_an_address_that_cannot_be_bound_is_an_error_and_close_frees_it(tmp_path: Path) -> None:
    """Which names the field."""
    with pytest.raises(ConfigError, match=r"kv_events_config\.endpoint"):
        Setup(tmp_path / "missing")
    first = Setup(tmp_path)
    address = "tcp://*:55871"
    other = Publisher(KVEventsConfig(address), Journal(10), first.blocks)
    with pytest.raises(ConfigError, match=r"kv_events_config\.endpoint.*55871"):
        Publisher(KVEventsConfig(address), Journal(10), first.blocks)
    other.close()
    Publisher(KVEventsConfig(address), Journal(10), first.blocks).close()
    first.close()


def test_adapters_have_their_names_and_other_versions_of_the_weights_empty_the_cache() -> None:
    """Text of earlier weights is not announced any more: no request can use it."""
    root = {"old": (0, None, ""), "new": (1, "abc", "s")}
    blocks = Blocks(4, {"full": ("full_attention", None)}, lambda: {"mine": "abc"}, root.__getitem__)
    (first,) = blocks.events([stored([1, 2], "old")])
    cleared, second = blocks.events(
        [stored([3, 4], "new"), stored([5, 6], "old"), Removed("GPU", "full", np.array([1]))]
    )
    assert cleared == {"type": "AllBlocksCleared"}
    assert second["lora_name"] == "mine"
    assert second["extra_keys"] == [("mine", "s"), ("mine",)]
    assert not set(first["block_hashes"]) & set(second["block_hashes"])
    assert blocks.announced == {("GPU", "full"): set(second["block_hashes"])}


def test_a_full_journal_makes_its_writer_wait_until_it_is_closed() -> None:
    """The engine does not wait for a publisher that has ended."""
    journal = Journal(1)
    journal.put(Cleared())
    journal.closed = True
    journal.put(Cleared())
    assert journal.take(10, 0) == [Cleared()]
