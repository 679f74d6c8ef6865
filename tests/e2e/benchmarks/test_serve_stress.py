"""The stress test of the server, at the size of a test."""

import asyncio
import json
from pathlib import Path

import pytest

from benchmarks.serve.load import Address
from benchmarks.serve.serve_stress import SOAKED, TINY, beside_malformed, soak
from tests.support.server.processes import ROOT, Process, started
from tests.support.tiny import ONE_SHAPE_FLAGS

FAKE = str(Path(__file__).parents[2] / "support" / "server" / "fake_process.py")


def address(server: Process) -> Address:
    """Where a server process listens."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    return Address(host, int(port), server.process.pid)


@pytest.mark.parametrize(("bodies", "streams"), [(300, 8), pytest.param(10_000, 32, marks=pytest.mark.nightly)])
def test_malformed_bodies_do_not_disturb_streams(bodies: int, streams: int) -> None:
    """Each stream gets the text that it gets alone, and nothing is held at the end."""
    command = ["-m", "jswa", "serve", "tiny", "--port", "0", *ONE_SHAPE_FLAGS]
    with started(command, environ={"JSWA_CHECK": "1"}) as server:
        found = asyncio.run(beside_malformed(address(server), bodies, streams))
        assert found["good_texts"] >= streams
        assert server.process.poll() is None


def test_hostile_requests_leave_nothing_behind_on_a_server_without_a_model() -> None:
    """Each kind of hostile request, at a hundredth of its size, beside four good streams."""
    options = {"api_key": ["good", "bad"], "admin_api_key": "root"}
    with started([FAKE, "{}", json.dumps(options)], environ={"PYTHONPATH": str(ROOT)}) as server:
        found = asyncio.run(soak(address(server), 1.0, 4, seed=1, share=0.01, warm_up=0.5))
        assert found["good_texts"] >= 4
        assert server.process.poll() is None


@pytest.mark.nightly
def test_hostile_requests_leave_nothing_behind() -> None:
    """Each of 32 streams gets the text that it gets alone, and nothing is held at the end."""
    with started([*TINY, *SOAKED], environ={"JSWA_CHECK": "1"}) as server:
        found = asyncio.run(soak(address(server), 20.0, 32, seed=1, share=0.05))
        assert found["good_texts"] >= 32
        assert server.process.poll() is None
