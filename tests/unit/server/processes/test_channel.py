"""Messages between the server's processes (server/processes/channel.py)."""

import asyncio
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from server.processes import frames
from server.processes.channel import Channel

MESSAGES = 300
LONG = list(range(3000))  # numbers of a message: a few hundred messages are more than a socket takes


def _itself(channel: Channel) -> Channel:
    return channel


async def _never(message: Any) -> NoReturn:
    raise AssertionError(message)


def _longer(held: list[frames.Abort]) -> frames.Abort:
    return frames.Abort([number for one in held for number in one.numbers], held[0].deliver_last)


async def _joined(hear: Callable[[Any], None], read: Callable[[], None]) -> tuple[Channel, Channel]:
    """Return both ends of a channel; `hear` and `read` are those of the second."""
    ends = socket.socketpair()
    first = Channel(frames.from_front_end, _never, lambda _: None, lambda: None, join=_longer)
    second = Channel(frames.from_front_end, _never, hear, lambda: None, read)
    first.socket = ends[0]
    for channel, end in zip((first, second), ends, strict=True):
        await asyncio.get_running_loop().create_unix_connection(partial(_itself, channel), sock=end)
    return first, second


async def _until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.001)


def test_messages_of_two_threads_arrive_whole_and_in_the_order_of_each() -> None:
    heard: list[frames.Abort] = []

    async def run() -> None:
        first, second = await _joined(heard.append, lambda: None)

        def tell() -> None:
            for number in range(MESSAGES):
                first.hold(frames.Abort([number, *LONG], True))
                first.flush()

        thread = threading.Thread(target=tell)
        thread.start()
        for number in range(MESSAGES):
            first.tell(frames.Abort([number, *LONG], False))
            if number % 10 == 0:
                await asyncio.sleep(0)
        await _until(lambda: len(heard) == 2 * MESSAGES)
        thread.join()
        first.close()
        second.close()

    asyncio.run(run())
    for last in (True, False):
        assert [one.numbers[0] for one in heard if one.deliver_last is last] == list(range(MESSAGES))
    assert all(one.numbers[1:] == LONG for one in heard)


def test_nothing_is_sent_at_once_to_a_process_that_has_ended() -> None:
    async def run() -> None:
        first, second = await _joined(lambda _: None, lambda: None)
        second.close()
        await _until(lambda: not second.open)
        await asyncio.sleep(0.01)
        first.hold(frames.Abort([1], True))
        first.flush()
        await _until(lambda: not first.open)
        first.hold(frames.Abort([1], True))
        first.flush()

    asyncio.run(run())


def test_what_has_been_read_is_told_once_for_several_messages() -> None:
    heard: list[Any] = []
    reads: list[int] = []

    async def run() -> None:
        first, second = await _joined(heard.append, lambda: reads.append(len(heard)))
        for _ in range(3):
            first.tell(frames.Ready())
        await _until(lambda: len(heard) == 3)
        first.close()
        second.close()

    asyncio.run(run())
    assert reads == [3]


def test_parts_that_are_held_are_one_message_before_the_next() -> None:
    heard: list[frames.Abort] = []

    async def run() -> None:
        first, second = await _joined(heard.append, lambda: None)
        for number in range(3):
            first.hold(frames.Abort([number], True))
        assert first.holds
        await asyncio.sleep(0.05)
        assert not heard
        first.tell(frames.Abort([9], False))
        assert not first.holds
        await _until(lambda: len(heard) == 2)
        first.hold(frames.Abort([3], True))
        first.flush()
        await _until(lambda: len(heard) == 3)
        first.close()
        second.close()

    asyncio.run(run())
    assert [(one.numbers, one.deliver_last) for one in heard] == [([0, 1, 2], True), ([9], False), ([3], True)]
