"""Drafts change no bit of a deterministic engine: in all forms of weights, with adapters, and on several devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = (
    ("llama+lora", 1), ("llama+room", 1), ("llama+int8", 1), ("llama+int4", 1), ("llama+order", 1), ("gemma3+kv", 1),
    ("gpt_oss+mxfp4", 1), ("mimo_v2_flash+fp8", 1), ("llama4", 1), ("gemma3", 2), ("gpt_oss", 2), ("llama4", 2),
)  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "devices", "method"), [*((*case, "suffix") for case in CASES), ("gpt_oss", 2, "ngram")]
)
def test_drafts_change_no_bit(name: str, devices: int, method: str, tmp_path: Path) -> None:
    """Cold, behind cached prefixes and behind rebuilt windows: tokens, log probabilities, and what is cached."""
    environ = {**os.environ, "PJRT_NPROC": "16"}  # each device that waits for others blocks a thread
    command = [sys.executable, "-m", "tests.support.drafts.forms", str(tmp_path), name, str(devices), method]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    plain, drafting = found["facts"]
    assert drafting == plain
    drafted, right = found["drafts"]
    assert drafted > right > 0
