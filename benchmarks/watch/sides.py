"""The two trees that are compared: where each is, and processes that measure in it.

A tree is a folder with what is measured, and links to the measuring programs of this repository. jswa is installed in
the environment too: every process checks that it imports it from its tree.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.result_file import ROOT

MEASURED = ("jswa", "pallas_kernels", "server")
PROGRAMS = ("benchmarks", "tools")
LIBRARY = Path("pallas_kernels", "cpu", "jswa_cpu.so")
GPU_PYTHON = ROOT / ".venv-gpu" / "bin" / "python"
_DROPPED = ("JSWA_", "JAX_", "XLA_", "PYTHON")  # variables whose names begin so change what is measured
_READS_LIBRARY = "from pallas_kernels.cpu import library; library.digest()"
Figures = dict[str, float]


class CannotMeasure(Exception):
    """A measurement that failed: the message is the last line of what the process said."""


@dataclass(frozen=True)
class Side:
    """A tree to measure.

    Attributes:
        folder: has jswa, pallas_kernels and server, and benchmarks and tools of this repository.
        own: has the tree's own benchmarks and tools, which are taken where there are any.
    """

    name: str
    folder: Path
    own: Path | None = None

    def environment(self) -> dict[str, str]:
        """Return the variables of a process that measures this tree."""
        paths = [path for path in (self.own, self.folder) if path is not None]
        given = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED)}
        return {
            **given,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTHONHASHSEED": "0",
            "OPENBLAS_NUM_THREADS": "1",
            "JAX_PLATFORMS": "cpu",
            "JSWA_COMPILATION_CACHE": str(self.folder / "programs-kept"),
        }

    def by_its_own(self) -> "Side | None":
        """Return this side with the programs of its own tree, or None if it has none."""
        own = self.folder.with_name(f"{self.folder.name}-own")
        return replace(self, own=own) if (own / "benchmarks").is_dir() else None


def sides(base: str, folder: Path) -> tuple[Side, Side]:
    """Return the base and this tree, both copied into a folder, with their libraries of CPU kernels built.

    This tree is copied as it is, changes that are not committed included. Raises CannotMeasure if git has no such
    commit.
    """
    found = Side("base", folder / "base"), Side("here", folder / "here")
    there, here = (side.folder for side in found)
    own = folder / "base-own"
    _check_out(base, there)
    own.mkdir()
    for name in PROGRAMS:
        if (there / name).is_dir():
            (there / name).rename(own / name)
    for name in MEASURED:
        (own / name).symlink_to(there / name)  # programs find files by their own place
        shutil.copytree(ROOT / name, here / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in PROGRAMS:
        for side in found:
            (side.folder / name).symlink_to(ROOT / name)
    if (ROOT / LIBRARY).is_file() and (there / LIBRARY).parent.is_dir():
        shutil.copy2(ROOT / LIBRARY, there / LIBRARY)  # mostly it is built from the same sources
    for side in found:
        _build(side)
    return found


def _check_out(commit: str, folder: Path) -> None:
    """Write the files of a commit that matter. It may be older than one of the folders."""
    there = _git("ls-tree", "--name-only", "-d", commit).decode().split()
    wanted = [name for name in (*MEASURED, *PROGRAMS) if name in there]
    with tempfile.TemporaryFile() as file:
        file.write(_git("archive", "--format=tar", commit, *wanted))
        file.seek(0)
        with tarfile.open(fileobj=file) as archive:
            archive.extractall(folder, filter="data")


def _git(*arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        raise CannotMeasure(f"git {arguments[0]}: {done.stderr.decode().strip()}")
    return done.stdout


def commit_of(revision: str) -> str:
    """Return the last commit up to this one that changed what is measured. Raises CannotMeasure."""
    found = _git("log", "-1", "--format=%h", revision, "--", *MEASURED).decode().strip()
    if not found:
        raise CannotMeasure(f"{revision} has none of {', '.join(MEASURED)}")
    return found


def is_changed() -> bool:
    """Return whether what is measured differs from the last commit."""
    return bool(_git("status", "--porcelain", "--", *MEASURED).strip())


def _build(side: Side) -> None:
    """Build the library of CPU kernels unless it is there; without a compiler XLA does its work, and this is said."""
    environment = side.environment()
    command = [sys.executable, "-P", "-c", _READS_LIBRARY]
    if subprocess.run(command, env=environment, cwd=side.folder, capture_output=True, check=False).returncode:
        command = [sys.executable, "-P", "-m", "pallas_kernels.cpu.build"]
        done = subprocess.run(command, env=environment, cwd=side.folder, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{side.name}: no native CPU kernels: {_last_line(done.stderr)}")


class Worker:
    """A process that measures one part in one tree, a turn whenever it is asked. Use it as a context manager.

    Args:
        seconds: after which the process is killed.
    """

    def __init__(self, part: str, side: Side, python: str, seconds: float) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - __exit__ closes it
        command = [python, "-P", str(ROOT / "benchmarks" / "watch" / "measure.py"), part, str(side.folder)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        self._process = subprocess.Popen(command, env=side.environment(), cwd=side.folder, text=True, **pipes)
        self._timer = threading.Timer(seconds, self._process.kill)
        self._timer.start()
        self._seconds, self._name = seconds, side.name

    def turn(self) -> Figures:
        """Measure once. Raises CannotMeasure with what the process said last."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer:
            found: Figures = json.loads(answer)
            return found
        self._process.wait()
        if not self._timer.is_alive():
            raise CannotMeasure(f"{self._name}: it took more than {self._seconds:g} s")
        self._errors.seek(0)
        raise CannotMeasure(f"{self._name}: {_last_line(self._errors.read())}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._process.kill()
        self._process.communicate()
        self._errors.close()


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it ended without a word"])[-1]
