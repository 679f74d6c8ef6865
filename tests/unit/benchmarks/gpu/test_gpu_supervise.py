"""`benchmarks.gpu.supervise`: cases that fail, hang or die are named, and the others still run."""

import time
from pathlib import Path

import pytest

from benchmarks.gpu.supervise import Cases, run_cases

BARE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # to import plugins takes seconds

TESTS = """
import os, time
import pytest

@pytest.mark.parametrize("what", ["right", "wrong", "hang", "die", "skip", "late"])
def test_case(what):
    if what == "wrong":
        assert 2 + 2 == 5, "arithmetic"
    if what == "hang":
        time.sleep(600)
    if what == "die":
        os._exit(9)
    if what == "skip":
        pytest.skip("not here")
"""


def test_a_case_that_fails_hangs_or_dies_is_named_and_costs_no_other(tmp_path: Path) -> None:
    """Two processes are lost on the way. Each case begins once."""
    file, log = tmp_path / "test_it.py", tmp_path / "it.log"
    file.write_text(TESTS)
    cases = Cases((str(file), "--noconftest", "-c", "/dev/null", "--rootdir", str(tmp_path)), 3)
    found = run_cases(cases, log, until=time.monotonic() + 300, environ=BARE)
    assert [(verdict.case.partition("[")[2], verdict.outcome) for verdict in found] == [
        ("right]", "passed"), ("wrong]", "failed"), ("hang]", "hung"), ("die]", "died"), ("skip]", "skipped"),
        ("late]", "passed"),
    ]  # fmt: skip
    assert "arithmetic" in found[1].why
    assert "test_it.py" in log.read_text(), "the stacks of the case that hangs are in the log"
    assert "time.sleep" in log.read_text() or "line 11" in log.read_text()
    assert found[3].why == "exit status 9"


@pytest.mark.nightly
def test_cases_are_shared_among_processes_and_stop_in_time(tmp_path: Path) -> None:
    """A shard has every second case; what has no time is not run; a file that is not there is an outcome too."""
    file = tmp_path / "test_it.py"
    file.write_text(TESTS)
    options = ("--noconftest", "-c", "/dev/null", "--rootdir", str(tmp_path))
    found = run_cases(
        Cases((str(file), *options, "-k", "right or late or skip"), 3, "1/2"),
        tmp_path / "a.log",
        until=time.monotonic() + 60,
        environ=BARE,
    )
    assert [verdict.outcome for verdict in found] == ["skipped"]
    found = run_cases(
        Cases((str(file), *options, "-k", "hang or late"), 50),
        tmp_path / "b.log",
        until=time.monotonic() + 6,
        environ=BARE,
    )
    assert {verdict.outcome for verdict in found} <= {"not run", "died"}
    (lost,) = run_cases(
        Cases((str(tmp_path / "absent.py"), *options), 3),
        tmp_path / "c.log",
        until=time.monotonic() + 60,
        environ=BARE,
    )
    assert lost.outcome == "died"
    assert "absent.py" in lost.why
