"""The stress test of the server, at the size of a test."""

import asyncio

import pytest

from benchmarks.speed.load import Address
from benchmarks.speed.serve_stress import beside_malformed
from tests.support.server.processes import started


@pytest.mark.parametrize("bodies", [300, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_malformed_bodies_do_not_disturb_streams(bodies: int) -> None:
    """Each of 32 streams gets the text that it gets alone, and nothing is held at the end."""
    # Few shapes: each of them is compiled.
    command = ["-m", "jswa", "serve", "tiny", "--port", "0", "--max-num-seqs", "8", "--max-num-batched-tokens", "64"]
    with started(command, environ={"JSWA_CHECK": "1"}) as server:
        host, _, port = server.url.removeprefix("http://").partition(":")
        found = asyncio.run(beside_malformed(Address(host, int(port), server.process.pid), bodies, 32))
        assert found["good_texts"] >= 32
        assert server.process.poll() is None
