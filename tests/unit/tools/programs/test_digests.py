"""The compiled programs are those whose digests are committed: a refactoring changes none of them.

A change on purpose is accepted by `python -m tools.programs digest`; the difference of the file names what changed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jswa.exec.programs.sampling import verify
from jswa.exec.programs.sampling import xla as sampling
from tools.programs import committed
from tools.programs.__main__ import missing_for
from tools.programs.configurations import CONFIGURATIONS
from tools.programs.lowered import Configuration, lowered

HALVES = "tiny, deterministic, CPU kernels"
ROOT = Path(__file__).parents[4]
_ALL = [pytest.param(one, id=one.name, marks=[pytest.mark.triton] * one.on_triton) for one in CONFIGURATIONS.values()]


def require(configuration: Configuration) -> None:
    """Skip the test if a package is missing that not every machine can have."""
    if (missing := missing_for(configuration)) is not None:
        pytest.skip(missing)


@pytest.mark.parametrize("configuration", _ALL)
def test_no_program_has_changed(configuration: Configuration) -> None:
    """Every program of a configuration has its committed digest."""
    require(configuration)
    if configuration.devices == 1:
        found = committed.named(configuration.name, lowered(configuration))
        assert not (changes := committed.changes(found)), changes
        return
    # The devices of a process are counted when jax first runs in it.
    command = [sys.executable, "-m", "tools.programs", "compare", configuration.name]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr.decode()


def test_every_committed_program_is_lowered() -> None:
    """The file has no program of a configuration that is gone, and each configuration has some."""
    assert {name.rpartition(": ")[0] for name in committed.read()} == set(CONFIGURATIONS)


def test_an_operation_in_the_sampler_changes_the_programs_that_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: it names the second half of a step, and leaves the first, which samples nothing."""
    require(CONFIGURATIONS[HALVES])
    sample: Any = sampling.sample

    def doubled(logits: Any, *rest: Any, **options: Any) -> Any:
        return sample(logits * 2, *rest, **options)

    monkeypatch.setattr(verify, "sample", doubled)
    message = committed.changes(committed.named(HALVES, lowered(CONFIGURATIONS[HALVES])))
    changed, _, same = message.partition("These have not:")
    assert f"{HALVES}: finish" in changed
    assert f"{HALVES}: forward" in same.splitlines()[1]
    assert "python -m tools.programs digest" in same


def test_digests_of_other_configurations_stay(tmp_path: Path) -> None:
    """Where jax-triton is missing, the digests that need it stay as they are; those of what is gone do not."""
    file = tmp_path / "digests.json"
    committed.write({"a: decode": "1", "a: prefill": "2", "b: decode": "3", "gone: decode": "4"}, {"a", "b"}, file)
    committed.write({"a: decode": "5"}, {"a", "b"}, file)
    assert committed.read(file) == {"a: decode": "5", "b: decode": "3"}


def test_programs_that_come_and_go_are_changes(tmp_path: Path) -> None:
    """A program that is new, and one that there is no longer, are named; other configurations are not compared."""
    file = tmp_path / "digests.json"
    committed.write({"a: old": "1", "a: kept": "2", "b: decode": "3"}, {"a", "b"}, file)
    assert committed.changes({"a: old": "1", "a: kept": "2"}, file) == ""
    message = committed.changes({"a: new": "4", "a: kept": "2"}, file)
    assert "a: new: none -> 4" in message
    assert "a: old: 1 -> none" in message
    assert "b: decode" not in message


def test_a_file_of_another_jax_says_so(tmp_path: Path) -> None:
    """Another version of jax lowers other operations."""
    file = tmp_path / "digests.json"
    file.write_text(json.dumps({"jax": "0.1", "programs": {"a: decode": "1"}}))
    assert "lowered by jax 0.1" in committed.changes({"a: decode": "2"}, file)
