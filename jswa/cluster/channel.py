"""Messages from host 0 to the other hosts over TCP, one connection each. No jax.

A collective of the devices would queue behind the running step, so the other hosts could never launch ahead.

A connection that closes without `_END` is a lost host. A process that dies closes its connection at once; the system's
probes detect a lost machine or network within `SILENCE` seconds. The other hosts send a single message: the one that
they were told to exit (`say_terminating`).
"""

import contextlib
import hmac
import os
import queue
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

from jswa.errors import ConfigError, HostLost

SECRET_BYTES = 32
SILENCE = 20  # seconds
_END = b"end"
_SIZE = struct.Struct("!Q")
_GREETING = SECRET_BYTES + _SIZE.size
_RETRY = 0.1
_STRANGERS = 100  # largest number of peers that have not sent their greeting

Lost = Callable[[HostLost], None]


def listen() -> socket.socket:
    """Return a socket that listens on a free port of all addresses."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def accept(server: socket.socket, nodes: int, secret: bytes, timeout: float) -> list[socket.socket]:
    """Return the connections of hosts 1 to `nodes` - 1, in order. A peer without the secret is refused.

    All peers are read at the same time, so that a peer that connects and sends nothing does not delay the others.
    Closes the server. Raises ConfigError if a host does not connect in time.
    """
    found: dict[int, socket.socket] = {}
    greetings: dict[socket.socket, bytes] = {}  # bytes that each new peer has sent so far
    end = time.monotonic() + timeout
    with server, selectors.DefaultSelector() as selector:
        server.setblocking(False)
        selector.register(server, selectors.EVENT_READ)
        try:
            while len(found) < nodes - 1:
                ready = selector.select(max(0.0, end - time.monotonic()))
                if time.monotonic() >= end:
                    missing = sorted(set(range(1, nodes)) - found.keys())
                    raise ConfigError("nnodes", nodes, f"hosts {missing} have not come in {timeout:g} s")
                for key, _ in ready:
                    peer = key.fileobj
                    assert isinstance(peer, socket.socket)
                    if peer is server:
                        _let_in(server, selector, greetings)
                    elif peer in greetings and _has_spoken(peer, greetings):
                        selector.unregister(peer)
                        rank = _rank_of(greetings.pop(peer), secret)
                        if rank in found or rank not in range(1, nodes):
                            peer.close()
                        else:
                            found[rank] = _steady(peer)
                            peer.settimeout(SILENCE)
        except BaseException:
            for peer in found.values():
                peer.close()
            raise
        finally:
            for peer in greetings:
                peer.close()
    return [found[rank] for rank in sorted(found)]


def _let_in(server: socket.socket, selector: selectors.BaseSelector, greetings: dict[socket.socket, bytes]) -> None:
    """Accept a peer. If too many peers have not sent their greeting, close the connection of the oldest of these."""
    try:
        peer, _ = server.accept()
    except OSError:
        return  # the peer has disconnected already
    peer.setblocking(False)
    selector.register(peer, selectors.EVENT_READ)
    greetings[peer] = b""
    if len(greetings) > _STRANGERS:
        oldest = next(iter(greetings))
        selector.unregister(oldest)
        del greetings[oldest]
        oldest.close()


def _has_spoken(peer: socket.socket, greetings: dict[socket.socket, bytes]) -> bool:
    """Read a part of a peer's greeting; return whether the greeting is complete or the peer has disconnected."""
    try:
        more = peer.recv(_GREETING - len(greetings[peer]))
    except OSError:
        more = b""
    greetings[peer] += more
    return not more or len(greetings[peer]) == _GREETING


def _rank_of(greeting: bytes, secret: bytes) -> int:
    """Return the rank in a greeting; 0 if the greeting is incomplete or has another secret."""
    if len(greeting) < _GREETING or not hmac.compare_digest(greeting[:SECRET_BYTES], secret):
        return 0
    (rank,) = _SIZE.unpack(greeting[SECRET_BYTES:])
    return int(rank)


def connect(host: str, port: int, rank: int, secret: bytes, timeout: float) -> socket.socket:
    """Connect to host 0. Raises ConfigError if it cannot be reached in time."""
    end = time.monotonic() + timeout
    while True:
        try:
            peer = socket.create_connection((host, port), timeout=max(0.001, end - time.monotonic()))
            peer.sendall(secret + _SIZE.pack(rank))
            return _steady(peer)
        except OSError as error:
            if time.monotonic() >= end:
                raise ConfigError("dist_init_addr", host, f"port {port} of it cannot be reached: {error}") from error
            time.sleep(_RETRY)


class Sender:
    """Host 0's end of the channel: sends to all other hosts, and watches their connections.

    Args:
        peers: connections, in order of rank.
        on_lost: called once, in a thread of its own, when a host is lost; may be replaced.
        on_terminating: called likewise for each host that was told to exit.
    """

    def __init__(self, peers: list[socket.socket], on_lost: Lost, on_terminating: Lost) -> None:
        self.on_lost = on_lost
        self.on_terminating = on_terminating
        self.lost: HostLost | None = None
        self._peers = peers
        self._names = [_name(rank, peer) for rank, peer in enumerate(peers, 1)]
        self._lock = threading.Lock()
        self._closed = False
        self._wake, woken = os.pipe()
        self._thread = threading.Thread(target=self._watch, args=(woken,), name="hosts", daemon=True)
        for peer in peers:
            peer.settimeout(SILENCE)
        self._thread.start()

    def send(self, message: bytes) -> None:
        """Send a message to all hosts. Raises HostLost if one cannot be reached."""
        with self._lock:
            for name, peer in zip(self._names, self._peers, strict=True):
                try:
                    peer.sendall(_SIZE.pack(len(message)) + message)
                except OSError as error:
                    raise HostLost(f"{name} cannot be reached: {error}") from error

    def close(self, *, end: bool = True) -> None:
        """Send the end; without `end`, let the other hosts see a loss. Closing twice is fine, also from a callback."""
        if self._closed:
            return
        self._closed = True
        os.close(self._wake)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        if self.lost is None and end:
            try:
                self.send(_END)
            except HostLost as error:
                self.lost = error
        for peer in self._peers:
            peer.close()

    def _watch(self, woken: int) -> None:
        """Watch the connections until the end, or the first loss."""
        with selectors.DefaultSelector() as selector:
            selector.register(woken, selectors.EVENT_READ)
            for name, peer in zip(self._names, self._peers, strict=True):
                selector.register(peer, selectors.EVENT_READ, name)
            while True:
                key = selector.select()[0][0]
                if self._closed:
                    break
                if not _says(self._peers[self._names.index(key.data)]):
                    self.lost = HostLost(f"{key.data} is gone, and its part of the model with it")
                    self.on_lost(self.lost)
                    break
                self.on_terminating(HostLost(f"{key.data} has been told to end"))
        os.close(woken)


def _says(peer: socket.socket) -> bool:
    """Return whether the peer has sent a byte, rather than closed the connection."""
    try:
        return bool(peer.recv(1))
    except OSError:
        return False


def say_terminating(peer: socket.socket) -> None:
    """Tell host 0 that this host was told to exit; host 0 then ends all hosts."""
    with contextlib.suppress(OSError):  # host 0 is lost; another thread detects that
        peer.sendall(b"!")


def messages(peer: socket.socket, on_lost: Lost) -> Iterator[bytes]:
    """Return the messages of host 0 until its end, and start reading them.

    `on_lost` is called in a thread of its own if the connection closes before the end.
    """
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    name = _name(0, peer)
    peer.settimeout(None)

    def read() -> None:
        try:
            message = b""
            while message != _END:
                (size,) = _SIZE.unpack(_receive(peer, _SIZE.size))
                message = _receive(peer, size)
                inbox.put(message)
        except OSError as error:
            on_lost(HostLost(f"{name} is gone: {error}"))

    threading.Thread(target=read, name="hosts", daemon=True).start()
    return iter(inbox.get, _END)


def _name(rank: int, peer: socket.socket) -> str:
    try:
        address = peer.getpeername()[0].removeprefix("::ffff:")
    except OSError:  # the peer has disconnected; the next use of the connection raises an error
        return f"host {rank}"
    return f"host {rank} ({address})"


def _receive(peer: socket.socket, size: int) -> bytes:
    """Receive exactly `size` bytes. Raises OSError if the connection closes before."""
    found = bytearray(size)
    view = memoryview(found)
    while view:
        count = peer.recv_into(view)
        if not count:
            raise ConnectionError("the connection has ended")
        view = view[count:]
    return bytes(found)


def _steady(peer: socket.socket) -> socket.socket:
    """Set TCP options: send small messages at once, and detect a dead peer within `SILENCE` seconds."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("KEEPIDLE", 5), ("KEEPINTVL", 5), ("KEEPCNT", 3), ("USER_TIMEOUT", SILENCE * 1000)):
        option = getattr(socket, f"TCP_{name}", None)  # Linux has all of them
        if option is not None:
            peer.setsockopt(socket.IPPROTO_TCP, option, value)
    return peer
