"""The findings of `jswa doctor` (jswa/commands/doctor.py)."""

import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from jswa.commands import doctor
from jswa.errors import KernelError
from jswa.exec.compile.ptxas import Ptxas
from jswa.kernels import OPERATIONS
from pallas_kernels.cpu import first_use, library
from pallas_kernels.cpu.build import CannotBuild

CPU = SimpleNamespace(id=0, platform="cpu", device_kind="cpu", memory_stats=lambda: None)
H200 = SimpleNamespace(
    id=0,
    platform="gpu",
    device_kind="NVIDIA H200",
    compute_capability="9.0",
    memory_stats=lambda: {"bytes_limit": 100 * 2**30, "bytes_in_use": 2**30},
)


def test_a_machine_that_is_well_has_no_advice(capsys: pytest.CaptureFixture[str]) -> None:
    """This one: the small model runs on its CPU."""
    assert doctor.report() == 0
    lines = capsys.readouterr().out.splitlines()
    found = [line for line in lines if not line.startswith(" ")]
    assert [line.split()[1] for line in found] == ["jswa:", "packages:", "device", "downloads:", "CPU", "kernels:"]
    assert all(line.startswith("ok ") for line in found)
    assert found[-1].endswith("a small model runs")
    table = [line.split(maxsplit=2) for line in lines[lines.index(found[-1]) + 1 :]]
    assert [row[0] for row in table] == list(OPERATIONS)
    assert table[0] == ["attention", "cpu", "the first choice on this device"]
    begins = {len("".join(re.findall(r"^ *\w+ +\w+ +", line))) for line in lines[-len(table) :]}
    assert len(begins) == 1, "columns are aligned"


def test_what_is_wrong_comes_with_advice_and_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that jax does not use, and kernels that are wrong."""

    def broken(*_: Any, **__: Any) -> Any:
        raise KernelError("attention of layers.0", 3.0, 0.1, "ptxas 12.8.93")

    monkeypatch.setattr("jswa.llm.LLM", broken)
    monkeypatch.setattr(doctor, "nvidia_driver", lambda: "580.95.05, NVIDIA H200, 140000 MiB, 143771 MiB")
    shown: list[str] = []
    assert doctor.report(shown.append) == 1
    wrong = [line for line in shown if line.startswith("wrong")]
    assert len(wrong) == 2
    assert 'jax does not use\n       → pip install ".[cuda13]" or ".[cuda12]" in the clone of jswa' in wrong[0]
    assert "attention of layers.0" in wrong[1]
    assert "--kernels xla" in wrong[1]


def test_lines_are_shown_as_soon_as_they_are_known() -> None:
    """The first ones come before jax is imported, and a reader of a pipe has them at once."""
    code = "import sys; from jswa.commands import doctor; sys.modules['jax'] = None; doctor.report()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "import of jax halted" in done.stderr
    assert done.stdout.splitlines()[1].startswith("ok     packages: jax ")


def test_a_cpu_without_its_kernels_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a remedy where there is one; and the table says which kernels run in their place."""
    failure = CannotBuild("there is no C++ compiler (g++)", "install g++")

    def provide(_: object) -> None:
        raise failure

    monkeypatch.setattr(first_use, "provide", provide)
    found = doctor.of_library(print)
    assert str(found) == "wrong  CPU kernels: there is no C++ compiler (g++)\n       → install g++"
    failure = CannotBuild("they are written for x86-64 Linux, and this is darwin arm64")
    assert doctor.of_library(print).level == "note"
    monkeypatch.setattr(first_use, "provide", lambda _: "lib.so")
    monkeypatch.setattr(library, "digest", lambda: "built")
    assert str(doctor.of_library(print)) == "ok     CPU kernels: lib.so"


def test_memory_of_a_gpu_is_what_jax_may_use() -> None:
    """Free and in all."""
    (found,) = doctor.of_devices([H200], "580.95.05")
    assert str(found) == "ok     device 0: NVIDIA H200 (gpu), 99.0 of 100.0 GiB free for jax"
    assert [finding.level for finding in doctor.of_devices([CPU], "")] == ["ok"]


@pytest.mark.parametrize(
    ("found", "level"), [(None, "wrong"), (Ptxas("/x", (12, 8, 93)), "wrong"), (Ptxas("/x", (13, 3, 1)), "ok")]
)
def test_a_compiler_that_gives_wrong_code_is_refused(
    found: Ptxas | None, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line names its version."""
    monkeypatch.setattr("jswa.exec.compile.ptxas.find_ptxas", lambda: found)
    monkeypatch.setenv("PATH", "")  # which `prefer_packaged` changes
    first = next(doctor.of_compiler())
    assert (first.subject, first.level) == ("ptxas", level)
    assert found is None or str(found) in first.found


def test_a_package_that_is_not_there_is_named() -> None:
    """Of those that jswa needs, all are."""
    assert doctor.installed("a-package-that-is-not-there") == "(not installed)"
    assert "(not installed)" not in [doctor.installed(name) for name in doctor.PACKAGES]
