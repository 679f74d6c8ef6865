"""The calls to a GPU: stages end in time and are taken up again; what comes back is small, and merges."""

import itertools
import json
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import result_file
from benchmarks.gpu.bring_back import LOGS, MOST_BYTES, MOST_FILES, RESULTS, SUMMARY, cut, merge, pack, unpack
from benchmarks.gpu.calls import CALL_SECONDS, CALLS, PACKING_SECONDS, REPORT_SECONDS
from benchmarks.gpu.ladder import broken
from benchmarks.gpu.numerics import GROUPS
from benchmarks.gpu.stage import Place, Stage, run_stages
from benchmarks.gpu.supervise import Verdict, end
from tools.cases.kernels.attention_matrix import covering
from tools.cases.kernels.ladder import KERNELS, RUNGS

ROOT = Path(__file__).parents[4]
MODULE = "tests.support.stage"
ENTRY = 'results {\n  device: "H200"\n  hlo: "%s"\n  result {\n    gemm {\n      algorithm: %d\n    }\n  }\n}\n'


@pytest.fixture
def place(tmp_path: Path) -> Place:
    for name in ("out", "earlier"):
        (tmp_path / name).mkdir()
    return Place(tmp_path / "out", tmp_path / "earlier", rehearse=True)


@pytest.mark.parametrize("call", CALLS)
def test_the_stages_of_a_call_fit_its_time(call: int) -> None:
    """The limits of all stages together are less than what it has."""
    stages = CALLS[call]
    assert sum(stage.most for stage in stages) <= CALL_SECONDS - PACKING_SECONDS - REPORT_SECONDS <= 270
    assert all(0 < stage.least < stage.most for stage in stages)
    assert {kernel for stage in stages for kernel in stage.needs} <= set(KERNELS)
    for stage in stages:
        assert (ROOT / (stage.module.replace(".", "/") + ".py")).is_file()
        inner = [float(after) for word, after in itertools.pairwise(stage.gpu) if word == "--seconds"]
        assert all(stage.least <= seconds < stage.most for seconds in inner), "the stage ends itself before it is ended"


def test_names_of_stages_are_those_of_their_files() -> None:
    """No stage overwrites another's."""
    names = [stage.name for stages in CALLS.values() for stage in stages]
    assert len(set(names)) == len(names)


def test_a_stage_is_run_once_ended_in_time_and_left_out_without_its_kernels(place: Place) -> None:
    """Each stage has a status and a reason; only what has ended well is complete, and is not run again."""
    good = Stage("good", MODULE, cpu=("good",))
    stages = [
        good,
        Stage("bad", MODULE, cpu=("bad",)),
        Stage("slow", MODULE, cpu=("slow",), least=1, most=2),
        Stage("needy", MODULE, cpu=("good",), needs=("fp8",)),
        Stage("told", MODULE, cpu=("{broken}", "{out}")),
        Stage("late", MODULE, cpu=("good",), least=10**6),
    ]
    result_file.write(place.earlier / "ladder.json", {"broken": ["fp8"]}, header={})
    ended = {one.stage: one for one in run_stages(stages, place, 600)}
    assert {name: one.status for name, one in ended.items()} == {
        "good": "complete", "bad": "failed", "slow": "out of time", "needy": "skipped", "told": "complete",
        "late": "not started",
    }  # fmt: skip
    assert ended["bad"].why == "exit status 3: it went wrong"
    assert "fp8" in ended["needy"].why
    told = json.loads((place.out / "told.json").read_text())
    assert told["words"] == ["fp8", str(place.out)]
    assert f"--xla_gpu_dump_autotune_results_to={place.out / 'told'}.autotune.txtpb" in told["flags"]
    assert "load_autotune" not in told["flags"]
    assert told["complete"] > 0
    place.autotuning.write_text("version: 3\n")
    again = run_stages([good, replace(stages[4], name="tuned")], place, 600)
    assert [one.status for one in again] == ["done before", "complete"]
    flags = json.loads((place.out / "tuned.json").read_text())["flags"]
    assert f"--xla_gpu_load_autotune_results_from={place.autotuning}" in flags
    assert [one.status for one in run_stages([good], place, 600, again=["good"])] == ["complete"]


def test_what_comes_back_is_unpacked_and_its_autotuning_merged(tmp_path: Path) -> None:
    """Two archives and a table. Long logs lose their middle."""
    place, out, home = tmp_path / "place", tmp_path / "out", tmp_path / "home"
    place.mkdir()
    home.mkdir()
    (home / "autotune.txtpb").write_text("version: 3\n" + ENTRY % ("a", 1))
    (place / "steps.json").write_text("{}\n")
    (place / "steps.log").write_text("begin" + "x" * 10**6 + "end")
    (place / "steps.autotune.txtpb").write_text("version: 3\n" + ENTRY % ("a", 2) + ENTRY % ("b", 3))
    made = pack(place, out, "a table\n")
    assert (
        sorted(path.name for path in made) == sorted([RESULTS, LOGS, SUMMARY]) == sorted(p.name for p in out.iterdir())
    )
    assert len(made) <= MOST_FILES
    assert all(path.stat().st_size < MOST_BYTES for path in made)
    with tarfile.open(out / LOGS) as logs:
        log = logs.extractfile("steps.log")
        assert log is not None
        text = log.read()
    assert text.startswith(b"begin")
    assert text.endswith(b"end")
    assert len(text) < 300_000
    assert cut(b"short") == b"short"
    assert [path.name for path in unpack(out, home)] == ["steps.json", "autotune.txtpb"]
    assert (home / "autotune.txtpb").read_text() == "version: 3\n" + ENTRY % ("a", 1) + ENTRY % ("b", 3)
    with pytest.raises(ValueError, match="several versions"):
        merge("version: 3\n", "version: 4\n")


def test_a_broken_rung_breaks_the_kernels_that_it_stands_for() -> None:
    """Cases that were skipped, or had no time, break nothing."""
    passed = [(rung, Verdict(rung.name, "passed")) for rung in RUNGS]
    assert broken(passed) == []
    for index, rung in enumerate(RUNGS):
        for outcome in ("failed", "hung", "died"):
            climbed = [*passed[:index], (rung, Verdict(rung.name, outcome)), *passed[index + 1 :]]
            assert set(broken(climbed)) == set(rung.kernels)
    assert broken([(rung, Verdict(rung.name, outcome)) for rung in RUNGS for outcome in ("skipped", "not run")]) == []


def test_each_kernel_has_a_rung_and_a_group_of_cases() -> None:
    assert {kernel for rung in RUNGS for kernel in rung.kernels} == set(KERNELS)
    assert {kernel for group in GROUPS for kernel in group.kernels} == set(KERNELS)


def test_a_covering_array_has_each_pair_of_values() -> None:
    factors = ("abcd", range(7), (16, 64, 128), range(5))
    found = covering(factors)
    assert len(set(found)) == len(found) <= 40
    for one, other in itertools.combinations(range(4), 2):
        assert {(row[one], row[other]) for row in found} == set(itertools.product(factors[one], factors[other]))


def test_a_process_that_is_ended_leaves_none_behind() -> None:
    """Not even one in a session of its own: it would go on to use the GPU."""
    command = [sys.executable, "-X", "faulthandler", "-m", MODULE, "parent"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        child = Path("/proc", process.stdout.readline().split()[1], "stat")
        end(process)
        assert "stage.py" in process.stderr.read(), "faulthandler has written where it was"
    give_up = time.monotonic() + 60  # a process that is killed still has to be scheduled to end
    while is_running(child) and time.monotonic() < give_up:
        time.sleep(0.05)
    assert not is_running(child)


def is_running(stat: Path) -> bool:
    """Whether a process, by its file in /proc, is there and no zombie."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
