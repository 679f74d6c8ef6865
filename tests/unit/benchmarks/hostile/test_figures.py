"""The figures of benchmarks.hostile, and which of its bars are missed."""

import asyncio
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from benchmarks.hostile import first, schemas, soak, tenants
from benchmarks.hostile.client import Timed, Tree, compared, family, in_turns, server_errors, timed
from benchmarks.serve.load import Address

AT = Address("localhost", 1, 0)
TREES = [Tree("here", AT, ("a", "b")), Tree("base", AT, ("a", "b"))]


def one_round(off: float, on: float, *, failed: int = 0) -> dict[str, Any]:
    """A round of two tenants whose 99th percentiles are these seconds."""
    return {
        "off": {"p50": off / 2, "p99": off, "worst": off}, "on": {"p50": on / 2, "p99": on, "worst": 2 * on},
        "failed": failed, "answers": {"200": 3},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("off", "on", "failed", "meets"),
    [
        (0.010, 0.159, 0, True),
        (0.010, 0.161, 0, False),
        (0.300, 0.590, 0, True),
        (0.300, 0.610, 0, False),
        (0.010, 0.010, 1, False),
    ],
)
def test_a_tenant_may_wait_twice_as_long_or_150_ms_longer(off: float, on: float, failed: int, meets: bool) -> None:
    assert tenants.summary([one_round(off, on, failed=failed)])["meets"] == meets


def test_a_tenants_figures_are_medians_of_rounds() -> None:
    found = tenants.summary([one_round(0.1, 0.2), one_round(0.1, 0.9), one_round(0.2, 0.3)])
    assert (found["off_p99"], found["on_p99"]) == (0.1, 0.3)
    assert (found["least"], found["ratio"], found["most"]) == pytest.approx((1.5, 2, 9))
    assert (found["worst"], found["answers"]) == (1.8, {"200": 9})


def test_a_round_without_a_token_is_no_figure() -> None:
    with pytest.raises(SystemExit, match="first token"):
        tenants.figures([])


def test_what_a_schema_adds_is_the_difference_of_medians() -> None:
    rounds = [{"plain": [1.0, 1.0, 9.0], "schema": [3.0, 3.0, 9.0]}, {"plain": [2.0], "schema": [5.0]}]
    found = first.summary(rounds)
    assert (found["median"], found["least"], found["most"], found["plain"]) == (4.0, 3.0, 5.0, 1.5)
    assert found["added"] == 2.5


def test_trees_take_turns_and_change_their_order() -> None:
    names = [(number, tree.name) for number, tree in in_turns(TREES, 3)]
    assert names == [(0, "here"), (0, "base"), (1, "base"), (1, "here"), (2, "here"), (2, "base")]


def test_ratios_are_of_this_tree_over_the_other() -> None:
    (row,) = compared(TREES, {"wait": {"here": [2.0, 6.0, 8.0], "base": [1.0, 2.0, 2.0]}})
    assert (row["least"], row["ratio"], row["most"]) == (2.0, 3.0, 4.0)
    assert compared(TREES[:1], {"wait": {"here": [2.0]}}) == []


@pytest.mark.parametrize(
    ("outcome", "is_error"),
    [("200", False), ("400", False), ("left", False), ("500", True), ("503", True), ("0", True),
     ("0 ConnectionResetError", True), ("200 failed in its stream", True)],
)  # fmt: skip
def test_errors_of_the_server_are_counted(outcome: str, is_error: bool) -> None:
    assert server_errors({outcome: 3}) == 3 * is_error


def stream(*times: float) -> Timed:
    """A stream whose tokens came at these moments."""
    return Timed(times[0] - 1, 200, list(times), times[-1])


@pytest.mark.parametrize(
    ("begin", "end", "gap"),
    [
        (11.5, 11.6, 1.0),  # inside of a gap
        (10.5, 12.5, 3.0),  # it ends inside of a long one
        (14.5, 16.0, 3.0),  # it begins inside of it
        (15.2, 15.8, 1.0),
        (0.0, 100.0, 3.0),
        (20.0, 21.0, 0.0),  # behind the stream
        (9.5, 9.6, 0.0),  # before the first token, whose time is no gap
    ],
)
def test_a_schema_has_the_longest_gap_that_it_touches(begin: float, end: float, gap: float) -> None:
    one = stream(10.0, 11.0, 12.0, 15.0, 16.0)
    assert schemas.longest([one], begin, end) == gap
    assert schemas.longest([stream(1.0, 2.0), one, stream(30.0, 50.0)], begin, min(end, 25.0)) >= gap


def test_an_excess_is_what_a_gap_has_over_the_median() -> None:
    beside = [stream(*map(float, range(20)), 25.0, 26.0)]
    answers = [Timed(3.2, 200, [], 4.1), Timed(21.0, 200, [], 22.0)]
    assert schemas.excesses(answers, beside) == [0.0, 5.0]


def test_a_schema_with_another_title_stays_itself() -> None:
    assert schemas.renamed({"type": "null"}, "x") == {"type": "null", "title": "x"}
    assert schemas.renamed(True, "x") is True


@pytest.mark.parametrize(
    ("memory", "share"),
    [([9, 9, 100, 100], 0), ([0] * 4 + [100, 50, 103, 103], 0.03), ([0] * 4 + [50, 100, 60, 100], 0)],
)
def test_growth_is_from_the_third_quarter_to_the_last(memory: list[float], share: float) -> None:
    assert soak.growth(memory) == pytest.approx(share)


def test_three_samples_are_too_few() -> None:
    with pytest.raises(SystemExit, match="too short"):
        soak.growth([1.0, 1.0, 1.0])


@pytest.mark.parametrize("name", soak.COUNTS)
def test_a_soak_that_keeps_something_misses_its_bar(name: str) -> None:
    before = dict.fromkeys(soak.COUNTS, 3.0)
    assert soak.missed_bars(0.0, before, before, Counter()) == []
    assert soak.missed_bars(0.0, before, {**before, name: 2.0}, Counter()) == []
    assert soak.missed_bars(0.0, before, {**before, name: 4.0}, Counter()) == [f"{name}: 3 before, 4 after"]


def test_a_soak_that_grows_or_fails_misses_its_bars() -> None:
    counts = dict.fromkeys(soak.COUNTS, 0.0)
    assert soak.missed_bars(0.029, counts, counts, Counter({"left: left": 2, "over: 400": 3})) == []
    assert len(soak.missed_bars(0.031, counts, counts, Counter({"over: 500": 1}))) == 2


def test_a_family_is_a_process_and_those_that_it_started() -> None:
    """Also those that a thread of it started, and their own."""
    inner = "print('there', flush=True); input()"
    started = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    outer = f"import threading; thread = threading.Thread(target=lambda: exec({started!r})); thread.start()"
    with subprocess.Popen([sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        found = family(process.pid)
        assert found[0] == process.pid
        assert len(found) == 2
        assert set(found) <= set(family(os.getpid()))
        counts = soak.of_family(process.pid)
        assert counts["processes"] == 2
        assert counts["threads"] == 3
        assert counts["memory_mib"] > 1
        process.communicate(b"\n")


def test_a_request_has_the_times_of_its_events_and_may_be_left() -> None:
    """A server that sends an event, and then ends or waits for its client to leave; or it sends no event."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await writer.drain()
        writer.write(b'{"a": 1}' if b"/none" in asked else b'data: {"a": 1}\n\n')
        if b"/left" in asked:
            await reader.read()
        writer.close()

    async def ask(path: str, leave: float | None) -> Timed:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await timed(Address("127.0.0.1", port, 0), b"", "key", path=path, leave_after=leave)

    whole = asyncio.run(ask("/whole", None))
    assert (whole.outcome, len(whole.times)) == ("200", 1)
    assert whole.begin < whole.times[0] <= whole.end
    assert asyncio.run(ask("/none", None)).times == []
    left = asyncio.run(ask("/left", 1.0))
    assert (left.outcome, left.status, len(left.times)) == ("left", 200, 1)
    assert left.end - left.begin >= 1
    refused = asyncio.run(timed(Address("127.0.0.1", 1, 0), b"", "key"))
    assert refused.outcome == "0 ConnectionRefusedError"
