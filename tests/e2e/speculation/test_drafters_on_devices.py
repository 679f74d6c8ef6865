"""Drafters that keep nothing of a row but KV, on several devices."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.nights import sample


@pytest.mark.parametrize("kind", sample(("dflash_beam", "dspark", "dspark_gemma4"), 3))
def test_two_devices_draft_what_one_drafts(kind: str) -> None:
    """DFlash2 chooses among the likeliest tokens of all devices. In a process with two devices."""
    command = [sys.executable, "-m", "tests.support.drafts.on_devices", kind]
    environ = {**os.environ, "PJRT_NPROC": "16"}  # each device that waits for others blocks a thread
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    one, two = map(json.loads, done.stdout.splitlines()[-2:])
    assert len(one["drafts"]) > 20
    assert one == two
