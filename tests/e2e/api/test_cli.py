"""The command line on `tiny`: text, JSON, statistics, and one-line errors."""

import json
import os
import re
import subprocess
import sys

import pytest

from jswa.commands.cli import run
from tests.support.tiny import ONE_SHAPE_FLAGS


def jswa(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a new process."""
    command = [sys.executable, "-m", "jswa", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environ})


def test_generate_prints_json_and_statistics() -> None:
    """One object per prompt, in order; speed and KV pages go to stderr."""
    done = jswa(
        "generate", "--json", "--stats", "--max-tokens", "4", "--temperature", "0", *ONE_SHAPE_FLAGS, "The cat", "One"
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["prompt"] for row in rows] == ["The cat", "One"]
    assert all(len(row["token_ids"]) == 4 and row["finish_reason"] == "length" for row in rows)
    assert "8 tokens in" in done.stderr
    assert "at the end: 0 full, 0 local" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("generate", "--model", "no/such/model", "x"), "no/such/model"),
        (("generate", "--max-model-len", "9999", "x"), "max_model_len = 9999"),
        (("generate", *ONE_SHAPE_FLAGS, "--temperature", "nan", "x"), "temperature = nan"),
        (("capacity", "no/such.json"), "such.json"),
    ],
)
def test_an_error_is_one_line_with_its_cause(
    arguments: tuple[str, ...], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2, no traceback; before it come the lines of a start only."""
    assert run(list(arguments)) == 2
    *before, last = capfd.readouterr().err.splitlines()
    assert said in last
    assert all(re.match("loading |model: |kernels: |weights: ", line) for line in before), before


def test_the_process_of_a_wrong_command_ends_with_its_status() -> None:
    """A mistyped switch in the environment ends the command before it does anything."""
    done = jswa("generate", "x", JSWA_CHEK="1")
    begun, said = done.stderr.splitlines()
    assert (done.returncode, begun) == (2, "loading tiny")
    assert "JSWA_CHEK" in said


def test_capacity_and_env_need_no_weights() -> None:
    """They print the layers of a config, and the versions."""
    from jswa.storage.hub import TINY

    capacity = jswa("capacity", str(TINY), "--block-size", "16")
    assert capacity.returncode == 0, capacity.stderr
    assert "2 full layers" in capacity.stdout
    assert "4 local layers" in capacity.stdout
    assert "jax 0.11" in jswa("env").stdout
