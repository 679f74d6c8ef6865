"""A model on several devices gives the tokens of one, also if they share tokens; in a process with eight devices."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parity.load import names
from tests.support.shared_model import MODELS

TIE, CLOSE = 1e-3, 1e-4  # docs/numerics.md
MOST_TIES = 1  # of nine texts: one may end at a choice between tokens whose log probabilities are within `TIE`
CASES = dict.fromkeys(MODELS, (1, 2, 4, 8)) | {
    "llama+int8": (1, 4),
    "mimo_v2_flash+fp8": (1, 8),
    "mimo_v2_flash+blocks": (1, 8),
    "gpt_oss+mxfp4": (1, 2, 8),
    "llama+int4": (1, 2, 8),
    "llama+order": (1, 8),
    "llama+nvfp4": (1, 2),
    "llama+lora": (1, 2, 8),
    "gpt_oss+experts": (1, 2, 8),
    "llama+room": (1, 2, 8),
    "gemma3+kv": (1, 4),
}
WINDOWS = (
    "gemma3",
    "gpt_oss",
    "mimo_v2_flash",
    "iquest_q1",
    "rnj1",
)  # models whose evicted windows are rebuilt; with chunks there is nothing to rebuild
Facts = dict[str, Any]


def program(folder: Path, name: str, *what: object) -> str:
    """Run tests.support.shared_model and return its output."""
    environ = {**os.environ, "PJRT_NPROC": "16"}  # each device that waits for others blocks a thread
    command = [sys.executable, "-m", "tests.support.shared_model", str(folder), name, *map(str, what)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def run(folder: Path, name: str, counts: tuple[int, ...]) -> dict[int, Facts]:
    """Return results and facts of engines on these numbers of devices."""
    last = program(folder, name, *counts).splitlines()[-1]
    return {int(devices): facts for devices, facts in json.loads(last).items()}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "llama+int4", "llama+order"])
def test_each_device_gets_its_part_of_the_weights(name: str, tmp_path: Path) -> None:
    """In all forms of weights; see `check_placed`."""
    program(tmp_path, name, "placed")


@pytest.mark.parametrize(
    ("name", "counts"),
    [("gpt_oss", (1, 4)), *(pytest.param(*case, marks=pytest.mark.nightly) for case in CASES.items())],
)
def test_several_devices_give_the_tokens_of_one(name: str, counts: tuple[int, ...], tmp_path: Path) -> None:
    """Cold, cached and revived, greedy and sampled; the arena, the collectives and the saved cache are checked too."""
    found = run(tmp_path, name, counts)
    one = found[1]
    assert not one["collectives"]
    for devices, facts in found.items():
        assert_same_text(facts, one)
        assert facts["cached"] > 0
        assert facts["revived"] > 0 or name.partition("+")[0] not in WINDOWS
        assert facts["saved"] == facts["loaded"] > 0
        assert facts["lane"] == [[devices, *facts["lane"][0][1:]], devices]
        if devices > 1:
            assert "tensor_parallel_size" in facts["refused"]
            assert facts["parameters"] < one["parameters"]
            assert_collectives(facts["collectives"], facts["layers"])


def assert_same_text(facts: Facts, one: Facts) -> None:
    """Assert that tokens are equal and log probabilities within `CLOSE`; see `MOST_TIES`."""
    ties = 0
    for turn, expected in zip(facts["turns"], one["turns"], strict=True):
        for row, other in zip(turn, expected, strict=True):
            for (token, logprob, _), (wanted, known, margin) in zip(row, other, strict=True):
                if token != wanted:
                    assert margin < TIE
                    ties += 1
                    break
                assert abs(logprob - known) < CLOSE
    assert ties <= MOST_TIES
    for row, other in zip(facts["prompt"], one["prompt"], strict=True):
        np.testing.assert_allclose(row, other, atol=CLOSE)
    np.testing.assert_allclose(facts["pooled"], one["pooled"], atol=CLOSE * np.abs(one["pooled"]).max())
    assert facts["drawn"] == one["drawn"]


def assert_collectives(found: list[list[str]], layers: int) -> None:
    """Assert of a first half: two reductions a layer, one for the embedding, one for the rows that are finite."""
    of = {
        part: [kind for kind, scope in found if part in scope.split("/")]
        for part in ("indices", "logits", "logits_state")
    }
    assert not any(of.values())
    for layer in range(layers):
        inside = [kind for kind, scope in found if f"layer_{layer}" in scope.split("/")]
        assert inside == ["all-reduce", "all-reduce"]
    rest = [kind for kind, scope in found if not {"sampling"} & set(scope.split("/")) and "layer_" not in scope]
    # XLA may name that of the rows that are finite after the embedding's, or after sampling.
    assert rest in (["all-reduce"], ["all-reduce", "all-reduce"])


SUMS = ["all-reduce", "all-reduce"]
CONTEXT_CASES = [f"{name}+context" for name in MODELS]
CONTEXT_CASES += ["gemma3+context_kv", "gpt_oss+context_drafts", "mimo_v2_flash+context_drafts"]


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("gpt_oss+context", (1, 4)),
        *(pytest.param(name, (1, 4, 8), marks=pytest.mark.nightly) for name in CONTEXT_CASES),
    ],
)
def test_devices_that_share_tokens_give_the_tokens_of_one(name: str, counts: tuple[int, ...], tmp_path: Path) -> None:
    """Cold, cached and revived, greedy and sampled. A full page takes 1/N of the bytes on each of N devices."""
    found = run(tmp_path, name, counts)
    one = found[1]
    for devices, facts in found.items():
        assert_same_text(facts, one)
        assert facts["cached"] > 0
        assert facts["revived"] > 0 or name.partition("+")[0] not in WINDOWS
        assert facts["saved"] == facts["loaded"] > 0
        assert devices * facts["page"] == one["page"]
        if devices > 1:
            assert "tensor_parallel_size" in facts["refused"]
            assert_one_merge(facts)


def assert_one_merge(facts: Facts) -> None:
    """Assert that a full layer gathers queries once and exchanges results once, and that other layers do neither."""
    for layer, kind in enumerate(facts["kinds"]):
        inside = sorted(name for name, scope in facts["collectives"] if f"layer_{layer}" in scope.split("/"))
        assert inside == (["all-gather", *SUMS, "all-to-all"] if kind == "full" else SUMS)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in names() if name.endswith("_base")])
def test_a_family_whose_tokens_devices_share_has_the_texts_of_one_device(name: str) -> None:
    """Arrivals in groups, in the smallest arena. A model that four devices cannot hold or share is refused by name."""
    command = [sys.executable, "-m", "tests.support.prefix.shared_families", name]
    environ = {**os.environ, "PJRT_NPROC": "16"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    if isinstance(found, dict):
        assert "tensor_parallel_size" in found["refused"] or "the model has no full layers" in found["refused"]
        return
    one, four = found
    assert_same_rows(four, one)


def assert_same_rows(rows: list[Any], expected: list[Any]) -> None:
    """Assert that tokens are equal and log probabilities within `CLOSE`; a text may end at a tie."""
    for row, other in zip(rows, expected, strict=True):
        for (token, logprob, _), (wanted, known, margin) in zip(row, other, strict=True):
            if token != wanted:
                assert margin < TIE
                break
            assert abs(logprob - known) < CLOSE
