"""A copy of the repository without a rib: its folder and its lines in the two tables are gone.

    python -m tests.support.ribs logprobs FOLDER [pytest's arguments]    run tests there that do not name the rib

The copy is of links but for the tables, so it takes a moment and sees changes of all other files.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LEFT_OUT = {".git", ".pytest_cache"}
TABLES = ("table.py", "traced.py")


def without(rib: str, folder: Path) -> Path:
    """Make the copy in an empty folder, and return it."""
    _link(ROOT, folder, but={*LEFT_OUT, "jswa"})
    _link(ROOT / "jswa", folder / "jswa", but={"ribs", "__pycache__"})
    _link(ROOT / "jswa" / "ribs", folder / "jswa" / "ribs", but={rib, *TABLES, "__pycache__"})
    for name in TABLES:
        lines = (ROOT / "jswa" / "ribs" / name).read_text().splitlines(keepends=True)
        kept = [line for line in lines if not re.search(rf"jswa\.ribs\.{rib}\b|^ +(\*\*)?{rib.upper()},$", line)]
        own = 2 if name == "table.py" or (ROOT / "jswa" / "ribs" / rib / name).exists() else 0  # some have no hooks
        assert len(lines) - len(kept) == own, f"{name} has an import and an entry of each rib"
        (folder / "jswa" / "ribs" / name).write_text("".join(kept))
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the copy, and return what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def _link(source: Path, target: Path, but: set[str]) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for entry in source.iterdir():
        if entry.name not in but:
            (target / entry.name).symlink_to(entry)


def main(rib: str, folder: str, *arguments: str) -> None:
    """Run the tests whose files do not name the rib. Exits as pytest does."""
    copy = without(rib, Path(folder))
    word = rib.rstrip("s")
    naming = [path for path in sorted((ROOT / "tests").rglob("*.py")) if word in path.read_text()]
    left_out = [f"--ignore={copy / path.relative_to(ROOT)}" for path in naming if path.name.startswith("test_")]
    print(f"{len(left_out)} test files name {word}")
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    command = [sys.executable, "-m", "pytest", *left_out, *arguments]
    sys.exit(subprocess.run(command, cwd=copy, env=environment, check=False).returncode)


if __name__ == "__main__":
    main(*sys.argv[1:])
