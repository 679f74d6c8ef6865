"""The calls to a GPU, rehearsed on a CPU: same stages, same files; and a kernel that is broken on purpose is named."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import result_file
from benchmarks.gpu.bring_back import unpack
from benchmarks.gpu.calls import CALLS
from tests.support.kernels.faults import FAULTS
from tests.support.nights import sample

ROOT = Path(__file__).parents[3]
STAGES = {stage.name: (call, stage) for call, stages in CALLS.items() for stage in stages}
PATIENCE = "30"  # no stage of a rehearsal fails because the machine is busy

# What each fault breaks: the rungs that must name it.
NAMED = {
    "window too short": "attention: window and sinks",
    "sinks dropped": "attention: window and sinks",
    "scales of 4-bit weights swapped": "experts: 4 bits",
    "next column of the page table": "attention: decode, splits",
    "products not accumulated": "a WGMMA with an operand in registers",
}


def run(module: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a module of the benchmarks."""
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.gpu.{module}", *arguments],
        cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, **environ},
    )  # fmt: skip


@pytest.mark.parametrize("name", sample(list(STAGES), len(STAGES)))
def test_a_stage_is_rehearsed(name: str, tmp_path: Path) -> None:
    """It ends well within its limit, unless it needs a package that is not there, and its result file comes back."""
    call, stage = STAGES[name]
    out, home = tmp_path / "out", tmp_path / "home"
    words = ["--call", str(call), "--out", str(out), "--rehearse", "--patience", PATIENCE, "--stages", name]
    done = run("run", *words, "--earlier", str(home))
    unpack(out, home)
    (row,) = result_file.read(home / f"call-{call}.json")["stages"]
    absent = [package for package in stage.packages if importlib.util.find_spec(package) is None]
    if absent:
        assert (row["status"], row["why"]) == ("skipped", f"not installed: {', '.join(absent)}")
        assert done.returncode == 0
        return
    assert row["status"] == "complete", (row, done.stdout)
    assert done.returncode == 0
    assert "complete" in result_file.read(home / f"{name}.json")


@pytest.mark.parametrize("fault", sample(list(FAULTS), len(FAULTS)))
def test_a_kernel_that_is_broken_on_purpose_is_named(fault: str, tmp_path: Path) -> None:
    """The rung fails, and the kernels that it stands for are broken. Without the fault it passes."""
    out = tmp_path / "ladder.json"
    done = run(
        "ladder", "--only", NAMED[fault], "--together", "--seconds", "3600", "--start-seconds", "900", "--rung-seconds",
        "900", "--json", str(out), PYTEST_PLUGINS="tests.support.kernels.faults", KERNEL_FAULT=fault,
    )  # fmt: skip
    found = result_file.read(out)
    assert done.returncode == 1, done.stdout + done.stderr
    assert [row["outcome"] for row in found["rungs"]] == ["failed"], found
    assert found["broken"] == list(found["rungs"][0]["kernels"])
    assert f"BROKEN {', '.join(found['broken'])}: {NAMED[fault]}: failed" in done.stdout


@pytest.mark.nightly
def test_the_whole_ladder_is_right_on_a_cpu(tmp_path: Path) -> None:
    """Interpreted. Only Triton's rung is left out."""
    out = tmp_path / "ladder.json"
    limits = ("--seconds", "3600", "--start-seconds", "900", "--rung-seconds", "900")
    done = run("ladder", "--together", *limits, "--json", str(out))
    outcomes = {row["rung"]: row["outcome"] for row in result_file.read(out)["rungs"]}
    assert done.returncode == 0, done.stdout
    assert {name for name, outcome in outcomes.items() if outcome != "passed"} == {"attention: Triton"}, outcomes


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["window too short", "sinks dropped"])
def test_numerics_name_the_case_of_a_fault(fault: str, tmp_path: Path) -> None:
    """In the group of cases that the GPU runs, too."""
    out = tmp_path / "numerics.json"
    limits = ("--seconds", "3600", "--start-seconds", "900", "--case-seconds", "900", "--processes", "1")
    case = "16 bits, 64/64 p16, window 64, sinks"
    chosen = ("--groups", "attention", "--only", "64/64 and sinks and not prefill")
    done = run(
        "numerics", *chosen, *limits, "--json", str(out),
        PYTEST_PLUGINS="tests.support.kernels.faults", KERNEL_FAULT=fault,
    )  # fmt: skip
    bad = [row for row in result_file.read(out)["cases"] if row["outcome"] == "failed"]
    assert done.returncode == 1, done.stdout
    assert any(case in row["case"] and row["group"] == "attention" for row in bad), done.stdout
