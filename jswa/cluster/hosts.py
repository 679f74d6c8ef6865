"""Several hosts as one engine: they join through `jax.distributed`, compare what they run, and watch each other.

If any host is lost, all hosts exit: a step that waits for a lost device cannot be cancelled. `channel` notices first;
the heartbeats of jax's coordination service notice a process that lives but does not answer.
"""

import atexit
import contextlib
import hashlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Never

import jax
import numpy as np
from jax.experimental import multihost_utils

from jswa.cluster.channel import SECRET_BYTES, SILENCE, Sender, accept, connect, listen, messages, say_terminating
from jswa.cluster.rank import Member
from jswa.errors import ConfigError, HostLost

_log = logging.getLogger("jswa")
_JOIN_SECONDS = 300  # until all hosts have joined; they may start minutes apart
_LEAVE_SECONDS = 15


class Hosts:
    """This process as a member of several hosts, from `join` to `close`. jax allows one per process."""

    def __init__(self, member: Member, sender: Sender | None, peer: socket.socket | None) -> None:
        self.member = member
        self._sender = sender
        self._peer = peer
        self._closed = False
        self._received = iter(()) if peer is None else messages(peer, self._lost)

    def broadcast(self, message: bytes) -> None:
        """Host 0 only: send a message to all other hosts. Raises HostLost."""
        assert self._sender is not None
        self._sender.send(message)

    def received(self) -> Iterator[bytes]:
        """Other hosts: return the messages of host 0, until it ends. The process exits if host 0 is lost."""
        return self._received

    def _lost(self, error: HostLost) -> None:
        if not self._closed:
            end_process(error)

    @contextmanager
    def outlive_signal(self) -> Iterator[None]:
        """Ignore the first SIGTERM or SIGINT but report it to host 0, whose requests may need this host."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        def wait(number: int, frame: FrameType | None) -> None:
            _log.info("%s: this host exits with host 0, or at the next signal", signal.Signals(number).name)
            restore()
            if number == signal.SIGTERM:  # a terminal sends SIGINT to all processes itself
                assert self._peer is not None
                say_terminating(self._peer)

        for number in before:
            signal.signal(number, wait)
        try:
            yield
        finally:
            restore()

    def when_lost(self, lost: Callable[[HostLost], None], leaving: Callable[[HostLost], None]) -> None:
        """Host 0 only: register callbacks that run in a thread of their own, instead of exiting when a host is lost.

        Args:
            lost: a host is gone, and a step may wait for it for ever.
            leaving: a host was told to exit. It keeps working until this one exits.
        """
        if self._sender is not None:
            self._sender.on_lost, self._sender.on_terminating = lost, leaving

    def least(self, number: int) -> int:
        """Return the minimum over all hosts of a number below 2^31."""
        return int(multihost_utils.process_allgather(np.array(number, np.int32)).min())

    def require_same(self, field: str, value: Mapping[str, str]) -> None:
        """Raise ConfigError on all hosts if the value of an option, by name, is not the same on all of them."""
        other = _unlike_first(str(sorted(value.items())))
        if other:
            self._closed = True  # each host ends with this error, not with the loss of another that ends sooner
            if self._sender is not None:
                self._sender.on_lost = lambda lost: None
            multihost_utils.sync_global_devices(field)
            raise ConfigError(field, ", ".join(value), f"hosts {other} have other contents of these names than host 0")

    def close(self) -> None:
        """Leave the group; host 0 tells the others. Closing twice is fine.

        If a host is lost, this exits the process: jax would wait for the lost host, and then abort.
        """
        if self._closed:
            return
        self._closed = True
        if self._sender is not None:
            self._sender.close()
            if self._sender.lost is not None:
                end_process(self._sender.lost)
        if self._peer is not None:
            self._peer.close()
        jax.distributed.shutdown()  # type: ignore[no-untyped-call]

    def abandon(self) -> None:
        """After an error on this host: make the others see a loss at once, and do not wait for them at exit."""
        self._closed = True
        if self._sender is not None:
            self._sender.close(end=False)
        if self._peer is not None:
            with contextlib.suppress(OSError):  # already gone, and the error on this host matters more
                self._peer.shutdown(socket.SHUT_RDWR)  # close alone would wait for the reading thread
        atexit.register(_end_now)


def join(member: Member, what: str) -> Hosts:
    """Wait for all hosts and check that they run the same `what`. Call it before jax initializes its devices.

    Raises ConfigError on all hosts if one of them runs something else.
    """
    if jax.distributed.is_initialized():
        raise ConfigError("nnodes", member.nodes, "this process has joined other hosts before, and can do so once only")
    _log.info("host %d of %d: waiting for the others at %s", member.rank, member.nodes, member.address)
    try:
        jax.distributed.initialize(
            member.address,
            member.nodes,
            member.rank,
            cluster_detection_method="deactivate",
            initialization_timeout=_JOIN_SECONDS,
            heartbeat_timeout_seconds=SILENCE,
            shutdown_timeout_seconds=_LEAVE_SECONDS,
        )
    except RuntimeError as error:
        raise ConfigError("dist_init_addr", member.address, f"the hosts have not come together: {error}") from error
    _require_same(member, what)
    if member.rank == 0:
        with listen() as server:
            secret = os.urandom(SECRET_BYTES)
            _share(server.getsockname()[1], secret)
            peers = accept(server, member.nodes, secret, float(_JOIN_SECONDS))
        return Hosts(member, Sender(peers, end_process, end_process), None)
    port, secret = _share(0, bytes(SECRET_BYTES))
    return Hosts(member, None, connect(member.host, port, member.rank, secret, float(_JOIN_SECONDS)))


def _require_same(member: Member, what: str) -> None:
    other = _unlike_first(what)
    if other:
        jax.distributed.shutdown()  # type: ignore[no-untyped-call]
        limit = f"hosts {other} have other options, another checkpoint or other versions than host 0"
        raise ConfigError("nnodes", member.nodes, limit)


def _unlike_first(what: str) -> list[int]:
    """Return the hosts that have another text than host 0."""
    digest = np.frombuffer(hashlib.sha256(what.encode()).digest(), np.int32)
    found = multihost_utils.process_allgather(digest)
    other: list[int] = np.flatnonzero((found != found[0]).any(axis=1)).tolist()
    return other


def _share(port: int, secret: bytes) -> tuple[int, bytes]:
    """Broadcast port and secret of host 0's channel."""
    words = np.concatenate([[np.int32(port)], np.frombuffer(secret, np.int32)])
    found = np.asarray(multihost_utils.broadcast_one_to_all(words))
    return int(found[0]), found[1:].astype(np.int32).tobytes()


def end_process(error: HostLost) -> Never:
    """Exit at once: threads that wait for a lost device would never end."""
    _log.critical("%s: %s", type(error).__name__, error)
    _end_now()


def _end_now() -> Never:
    logging.shutdown()
    with contextlib.suppress(OSError, ValueError):  # closed, or a broken pipe
        sys.stdout.flush()
    os._exit(1)
