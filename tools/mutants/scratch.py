"""Copies of the tree in which mutants live: the user's tree is never changed."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tools.mutants.places import Mutant, applied, find
from tools.mutants.plugin import Task, Told

_WAIT = 900  # seconds for which a process may wait without using the CPU
_PYTEST = ("-m", "pytest", "-q", "-n", "0", "-p", "tools.mutants.plugin", "-p", "no:cacheprovider", "--tb=no")


class Ran(NamedTuple):
    """How a test process ended: pytest's status, negative if a signal killed it; and what its tests have told."""

    status: int
    told: list[Told]


class Tree:
    """A copy of the tree with at most one mutant in it. Compiled programs are kept in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        self._programs = folder / "programs"

    @contextmanager
    def mutated(self, mutant: Mutant, files: Sequence[str]) -> Iterator[None]:
        """Make the change while the context lasts; raises LookupError if its place is gone."""
        place = find(mutant, self.root, files)
        if place is None:
            raise LookupError(mutant.id)
        path = self.root / place.file
        source, status = path.read_text(encoding="utf-8"), path.stat()
        _forget(path)
        path.write_text(applied(source, place.node, mutant.after), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(source, encoding="utf-8")
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            _forget(path)

    def pytest(self, paths: Sequence[str], task: Task, *options: str, seconds: int = 0) -> Ran:
        """Run tests. One that uses more CPU `seconds` is killed (0: never)."""
        request = self.root.parent / "task.json"
        request.write_text(json.dumps(task._asdict()), encoding="utf-8")
        answer = request.with_suffix(".out")
        answer.unlink(missing_ok=True)
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.root),
            "MUTANTS": str(request),
            "TEST_PROGRAMS": str(self._programs),
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # compiling all modules takes longer than most tests
        process = subprocess.Popen(
            [sys.executable, *_PYTEST, "--hypothesis-seed=0", *options, *paths],
            cwd=self.root,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            if seconds:
                resource.prlimit(process.pid, resource.RLIMIT_CPU, (seconds, seconds))
            status = process.wait(timeout=seconds * 10 + _WAIT)
        except subprocess.TimeoutExpired:
            status = -signal.SIGXCPU
        finally:
            _kill(process)
        told = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else []
        return Ran(status, [Told(**one) for one in told])


def _forget(path: Path) -> None:
    """Delete a module's bytecode: it would pass for that of another source of its size and second."""
    for bytecode in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        bytecode.unlink()


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and those that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def trees(root: Path, count: int) -> Iterator[list[Tree]]:
    """Yield copies of the tree of git below `root`, with its compiled libraries; they vanish with the context."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root, capture_output=True, text=True, check=True,
    )  # fmt: skip
    libraries = [path.relative_to(root).as_posix() for path in (root / "pallas_kernels").rglob("*.so")]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        found = [Tree(Path(folder) / str(index)) for index in range(count)]
        for tree in found:
            for name in [*filter(None, listed.stdout.split("\0")), *libraries]:
                if (root / name).is_file():
                    (tree.root / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(root / name, tree.root / name)
            _warm(tree.root.parent / "programs")
        yield found


def _warm(folder: Path) -> None:
    """Begin with the programs that tests have compiled before, where the system links files."""
    folder.mkdir(mode=0o700)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kept = Path(os.environ.get("TEST_PROGRAMS") or home / "jswa-tests" / "programs")
    for path in kept.iterdir() if kept.exists() else ():
        try:
            os.link(path, folder / path.name)
        except FileNotFoundError:  # another test process has deleted it
            continue
        except OSError:
            return
