"""What the stages of a call count: cached against cold, launches, tunings of experts."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from benchmarks.gpu.engine.cached import Text, compare, wrong
from benchmarks.gpu.engine.decode_steps import IN_FLIGHT, lay_out_rows, time_steps
from benchmarks.gpu.kernels import dense, sampling
from benchmarks.gpu.kernels.attention_cases import DECODE, MEASURES, PREFILL
from benchmarks.gpu.kernels.device_time import Timing
from benchmarks.gpu.kernels.tune_experts import candidates
from jswa.architecture import Reach
from jswa.config import Limits
from pallas_kernels.experts.hopper.heuristics import default_tuning
from pallas_kernels.experts.hopper.launch import Shape, launch
from pallas_kernels.interpreter import interpreted
from tests.support.builders import make_layout
from tools.cases.kernels.experts import LAYERS
from tools.cases.kernels.experts_shapes import arguments

COLD = Text([5, 6, 7], [-1.0, -2.0, -3.0], 0)


def test_a_flip_hides_no_difference_before_it_and_shows_none_behind_it() -> None:
    """Log probabilities are compared up to the first token that differs."""
    same, close = Text([5, 6, 7], [-1.0, -2.0, -3.0], 9), Text([5, 6, 7], [-1.0, -2.5, -3.0], 8)
    flipped = Text([5, 9, 7], [-1.25, -9.0, -9.0], 7)
    found = compare([(COLD, same), (COLD, close), (COLD, flipped)])
    assert found == {
        "prompts": 3, "equal": 1, "flipped": 1, "worst_logprob": 0.5, "cached_tokens": 7, "cold_tokens": 0,
    }  # fmt: skip


def test_draws_are_timed_and_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In small here, and of XLA alone."""
    file = tmp_path / "sampling.json"
    monkeypatch.setattr(sampling, "LIMITS", {"greedy": {}})
    arguments = "sampling --smoke --implementations xla --json"
    monkeypatch.setattr(sys, "argv", [*arguments.split(), str(file)])
    sampling.main()
    rows = json.loads(file.read_text())["sampling"]
    assert [(row["limits"], row["xla, tokens that differ"]) for row in rows] == [("greedy", 0)]


def test_linear_layers_are_timed_in_all_forms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In small here, and of XLA alone; interpreted, the kernel's numbers are those of XLA but for rounding."""
    file = tmp_path / "dense.json"
    monkeypatch.setattr(sys, "argv", ["dense", "--smoke", "--tokens", "3", "--json", str(file)])
    dense.main()
    (row,) = json.loads(file.read_text())["linear"]
    assert row["16 bits on XLA, us"] > 0 < row["4 bits on XLA, us"]
    monkeypatch.setattr(dense, "time_calls", lambda *_: Timing(1e-6, 1e-6, 1e-6))
    with interpreted():
        found = dense.compared(dense.SMOKE, 3, ["4 bits on XLA", "4 bits on Mosaic"], 1e9)
    assert found["difference"] < 2.0**-6


@pytest.mark.parametrize(
    ("change", "law"),
    [
        ({}, ""),
        ({"deterministic": False, "equal": 3, "flipped": 1, "worst_logprob": 0.01}, ""),
        ({"equal": 3}, "1 of 4 prompts differ though all steps run in one program"),
        ({"deterministic": False, "worst_logprob": 0.2}, "log probabilities differ by 0.2"),
        ({"deterministic": False, "worst_logprob": float("nan")}, "log probabilities differ by nan"),
        ({"cached_tokens": 0}, "0 tokens were cached"),
        ({"cold_tokens": 5}, "5 in a cold prompt"),
    ],
)
def test_each_broken_law_is_named(change: dict[str, Any], law: str) -> None:
    """Without `deterministic`, rounding may differ and tokens may flip; nothing else may."""
    row = {"deterministic": True, "prompts": 4, "equal": 4, "flipped": 0, "worst_logprob": 0.0}
    found = wrong({**row, "cached_tokens": 700, "cold_tokens": 0, **change}, 0.05)
    assert law in found
    assert bool(law) == bool(found)


def test_only_launches_that_do_not_wait_for_the_device_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock of this test a launch takes a second, and a minute once more than 24 are on their way."""
    clock, launched = [0.0], [0]

    def launch_one(_plan: Any) -> Any:
        launched[0] += 1
        clock[0] += 1 if launched[0] <= IN_FLIGHT + 1 else 60  # the first one is waited for
        return SimpleNamespace(tokens=lambda: None)

    limits = Limits(64, 8, 16, 4, num_slabs=200)
    runner: Any = SimpleNamespace(
        layout=make_layout(4, Reach(10), num_full=1, num_local=2), limits=limits, launch=launch_one
    )
    rows = lay_out_rows(runner, 3, 10, 50)
    assert rows is not None
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    step, launch_seconds = time_steps(runner, rows, 2 * IN_FLIGHT, 1)
    assert launch_seconds == 1
    assert step == 60 * IN_FLIGHT / (2 * IN_FLIGHT - 1)  # from the end of the first step, which has been launched


@pytest.mark.parametrize("tokens", [1, 256, 2048])
def test_every_tuning_of_experts_that_is_tried_fits(tokens: int) -> None:
    """The default is the first of them."""
    given, shapes = arguments(LAYERS[1], "up", tokens), []

    def plan(x: jax.Array, weights: Any, bias: Any) -> jax.Array:
        shapes.append(Shape.of(x, weights, bias, given.gated))
        return x

    jax.eval_shape(plan, given.x, given.weights, given.bias)
    first = default_tuning(shapes[0])
    tried = list(candidates(shapes[0], first))
    assert tried[0] == first or first.stages not in (2, 3, 4, 6)
    assert len(set(tried)) == len(tried) > 10
    for tuning in tried:
        launch(shapes[0], tuning)


def test_a_run_that_is_short_of_time_has_measured_decode_and_prefill() -> None:
    """All measures, in turn."""
    assert sorted(measure.label for measure in MEASURES) == sorted(measure.label for measure in (*DECODE, *PREFILL))
    assert MEASURES[:4] == (DECODE[0], PREFILL[0], DECODE[1], PREFILL[1])
