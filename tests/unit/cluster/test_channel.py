"""Messages of the first host arrive in order, lost hosts are noticed, and strangers cannot connect."""

import contextlib
import queue
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from jswa.cluster.channel import SECRET_BYTES, Sender, accept, connect, listen, messages, say_terminating
from jswa.errors import ConfigError, HostLost

SECRET = b"s" * SECRET_BYTES


class Losses:
    """Collects the hosts that are reported as lost."""

    def __init__(self) -> None:
        self.found: queue.Queue[HostLost] = queue.Queue()

    def __call__(self, error: HostLost) -> None:
        self.found.put(error)

    def wait(self) -> str:
        return str(self.found.get(timeout=10))


@contextmanager
def hosts(nodes: int, losses: Losses, leaving: Losses | None = None) -> Iterator[tuple[Sender, list[socket.socket]]]:
    server = listen()
    port = server.getsockname()[1]
    # Hosts connect in any order.
    peers = {rank: connect("127.0.0.1", port, rank, SECRET, 10.0) for rank in reversed(range(1, nodes))}
    sender = Sender(accept(server, nodes, SECRET, 10.0), losses, leaving or losses)
    try:
        yield sender, [peers[rank] for rank in range(1, nodes)]
    finally:
        sender.close()
        for peer in peers.values():
            peer.close()


def send_for_ever(sender: Sender) -> None:
    while True:
        sender.send(b"x" * 1000)


def test_all_hosts_get_all_messages_in_order() -> None:
    sent = [bytes([number % 256]) * (number * 997) for number in range(1, 60)]
    losses = Losses()
    with hosts(3, losses) as (sender, peers):
        found: list[list[bytes]] = [[], []]
        threads = [threading.Thread(target=lambda i=i: found[i].extend(messages(peers[i], losses))) for i in range(2)]
        for thread in threads:
            thread.start()
        for message in sent:
            sender.send(message)
        sender.close()
        for thread in threads:
            thread.join(10)
    assert found == [sent, sent]
    assert losses.found.empty()


def test_a_lost_follower_is_reported_once() -> None:
    losses = Losses()
    with hosts(3, losses) as (sender, peers):
        peers[1].close()
        assert losses.wait() == "host 2 (127.0.0.1) is gone, and its part of the model with it"
        assert str(sender.lost).startswith("host 2")
        with pytest.raises(HostLost, match="host 2"):
            send_for_ever(sender)
        sender.close()
        assert losses.found.empty()


def test_a_host_that_gets_a_signal_reports_it_and_continues() -> None:
    losses, leaving = Losses(), Losses()
    with hosts(3, losses, leaving) as (sender, peers):
        say_terminating(peers[1])
        assert leaving.wait() == "host 2 (127.0.0.1) has been told to end"
        told = messages(peers[1], losses)
        sender.send(b"one")
        assert next(told) == b"one"
        assert losses.found.empty()
        peers[0].close()
        assert losses.wait().startswith("host 1 (127.0.0.1) is gone")


def test_a_lost_first_host_is_reported() -> None:
    losses, server = Losses(), listen()
    follower = connect("127.0.0.1", server.getsockname()[1], 1, SECRET, 10.0)
    (accepted,) = accept(server, 2, SECRET, 10.0)
    sender, received = Sender([accepted], Losses(), Losses()), messages(follower, losses)
    sender.send(b"one")
    assert next(received) == b"one"
    accepted.shutdown(socket.SHUT_RDWR)  # as the system does when a process ends
    assert "host 0 (127.0.0.1) is gone" in losses.wait()
    sender.close()
    follower.close()


def test_connections_without_the_secret_are_closed() -> None:
    server = listen()
    port = server.getsockname()[1]
    stranger = connect("127.0.0.1", port, 1, b"t" * SECRET_BYTES, 10.0)
    again = connect("127.0.0.1", port, 0, SECRET, 10.0)  # the rank of the first host itself
    host = connect("127.0.0.1", port, 1, SECRET, 10.0)
    (peer,) = accept(server, 2, SECRET, 10.0)
    assert peer.getpeername()[1] == host.getsockname()[1]
    assert stranger.recv(1) == again.recv(1) == b""
    for each in (stranger, again, host, peer):
        each.close()


def test_hosts_that_do_not_connect_are_named() -> None:
    with pytest.raises(ConfigError, match=r"nnodes = 3: hosts \[1, 2\] have not come in 0\.05 s"):
        accept(listen(), 3, SECRET, 0.05)
    server = listen()
    port = server.getsockname()[1]
    server.close()
    with pytest.raises(ConfigError, match=rf"dist_init_addr = '127.0.0.1': port {port} of it cannot be reached"):
        connect("127.0.0.1", port, 1, SECRET, 0.05)


def test_silent_strangers_hold_up_no_host() -> None:
    """However many connect and say nothing, or a part of a greeting: the host is found at once, they are closed."""
    server = listen()
    port = server.getsockname()[1]
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(120)]
    silent[-1].sendall(SECRET[:7])
    host = connect("127.0.0.1", port, 1, SECRET, 10.0)
    got: list[socket.socket] = []
    thread = threading.Thread(target=lambda: got.extend(accept(server, 2, SECRET, 600.0)), daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive(), "a stranger holds up the host"
    assert got[0].getpeername()[1] == host.getsockname()[1]
    for each in silent:
        each.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert each.recv(1) == b""
    for each in (*silent, host, *got):
        each.close()


def test_a_greeting_may_come_in_pieces() -> None:
    server = listen()
    host = socket.create_connection(("127.0.0.1", server.getsockname()[1]))
    got: list[socket.socket] = []
    thread = threading.Thread(target=lambda: got.extend(accept(server, 2, SECRET, 10.0)), daemon=True)
    thread.start()
    for byte in SECRET + (1).to_bytes(8):
        host.sendall(bytes([byte]))
    thread.join(5)
    assert len(got) == 1
    for each in (host, *got):
        each.close()


def test_a_host_that_goes_before_it_has_a_name_is_lost_like_any_other() -> None:
    """A connection that was reset has no address any more."""
    server = listen()
    host = connect("127.0.0.1", server.getsockname()[1], 1, SECRET, 10.0)
    (accepted,) = accept(server, 2, SECRET, 10.0)
    host.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    host.close()  # resets the connection
    with contextlib.suppress(OSError):
        while True:
            accepted.sendall(b"x")
    with pytest.raises(OSError, match="not connected"):
        accepted.getpeername()
    losses = Losses()
    sender = Sender([accepted], losses, Losses())
    assert losses.wait().startswith("host 1 is gone")
    sender.close()


def test_a_callback_may_close_the_channel() -> None:
    """`on_lost` runs in the thread that watches, which cannot wait for itself."""
    server = listen()
    host = connect("127.0.0.1", server.getsockname()[1], 1, SECRET, 10.0)
    closed: queue.Queue[BaseException | None] = queue.Queue()
    begun = threading.Event()  # `lost` knows the sender

    def lost(error: HostLost) -> None:
        begun.wait(5)
        try:
            sender.close()
        except BaseException as raised:
            closed.put(raised)
        else:
            closed.put(None)

    sender = Sender(accept(server, 2, SECRET, 10.0), lost, Losses())
    begun.set()
    host.close()
    assert closed.get(timeout=10) is None
    sender.close()
