"""The thread that publishes events about cached KV over ZeroMQ.

Messages are those of vLLM 0.33 (distributed/kv_events.py). PUB sends [topic, number (8 bytes, big-endian), batch]; a
batch is msgpack of [seconds since 1970, events, rank]. ROUTER answers a number with all batches from it on that are
kept, each after the frames [client, empty, topic], and ends with the number -1.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable

import msgspec
import numpy as np
import zmq

from jswa.errors import ConfigError
from jswa.kv_events.blocks import Blocks, Event
from jswa.kv_events.journal import Journal
from jswa.kv_events.options import OPTION, KVEventsConfig

_log = logging.getLogger("jswa")
_END = (-1).to_bytes(8, "big", signed=True)
_ARRAY32, _INT32 = b"\xdd", 0xD2  # msgpack's marks of a list with 32 bits of length, and of an integer of 32 bits
_ITEM = np.dtype([("type", "u1"), ("value", ">i4")])
_BATCH, _WAIT = 1024, 0.05  # notes in a batch, and seconds between looks at the requests for earlier batches


class Publisher:
    """Owns the sockets and the thread. Raises ConfigError if an address cannot be used."""

    def __init__(self, config: KVEventsConfig, journal: Journal, blocks: Blocks) -> None:
        self._config, self._journal, self._blocks = config, journal, blocks
        self._context = zmq.Context()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._number = 0
        try:
            self._pub = self._open(zmq.PUB, "endpoint", config.endpoint, config.hwm)
            # A whole replay and its end fit twice: ZeroMQ tells what was read only after half of it.
            room = 2 * (config.buffer_steps + 1)
            replay = config.replay_endpoint
            self._router = None if replay is None else self._open(zmq.ROUTER, "replay_endpoint", replay, room)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish what was noted, and close the sockets."""
        self._journal.closed = True
        self._thread.join(5)

    def _open(self, kind: int, name: str, address: str, room: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, room)
        socket.setsockopt(zmq.LINGER, 0)
        bound = "*" in address or "::" in address or address.startswith(("ipc://", "inproc://")) or kind == zmq.ROUTER
        try:
            if bound:
                socket.bind(address)
            else:
                socket.connect(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"{OPTION}.{name}", address, f"cannot be opened: {error}") from error
        if bound and ("*" in address or "::" in address):
            _log.warning("%s: whoever reaches %s can read the tokens of all prompts", OPTION, address)
        return socket

    def _run(self) -> None:
        try:
            while True:
                closed = self._journal.closed
                changes = self._journal.take(_BATCH, _WAIT)
                if changes:
                    self._publish(self._blocks.events(changes))
                elif closed:
                    break
                if self._router is not None:
                    self._answer(self._router)
        except Exception:
            _log.exception("%s: no more events are published", OPTION)
        finally:
            self._journal.closed = True
            self._context.destroy(linger=200)

    def _publish(self, events: Iterable[Event]) -> None:
        encoded = [msgspec.Raw(encode(event)) for event in events]  # one by one: few objects for the garbage collector
        if encoded:
            batch = encode([time.time(), encoded, 0])
            self._pub.send_multipart([self._config.topic.encode(), self._number.to_bytes(8, "big"), batch])
            self._kept.append((self._number, batch))
            self._number += 1

    def _answer(self, router: zmq.Socket[bytes]) -> None:
        """Send earlier batches to all who ask for them; a request of another form is ignored."""
        while router.poll(0):
            frames = router.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                _log.warning("%s: a request for earlier batches must be an empty frame and 8 bytes", OPTION)
                continue
            first, topic = int.from_bytes(frames[2], "big"), self._config.topic.encode()
            for number, batch in self._kept:
                if number >= first:
                    router.send_multipart([frames[0], b"", topic, number.to_bytes(8, "big"), batch])
            router.send_multipart([frames[0], b"", b"", _END, b""])


def _list_of(tokens: object) -> msgspec.Raw:
    """Return an array of token ids [n] as a list in msgpack, each id in 4 bytes (int32, big-endian)."""
    assert isinstance(tokens, np.ndarray)
    items = np.empty(len(tokens), _ITEM)
    items["type"], items["value"] = _INT32, tokens
    return msgspec.Raw(_ARRAY32 + len(tokens).to_bytes(4, "big") + items.tobytes())


encode = msgspec.msgpack.Encoder(enc_hook=_list_of).encode
