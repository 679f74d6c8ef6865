"""The rooms that mutants are drawn from: their sources, and the tests that are asked about them."""

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PER_ROOM = 40
# Code that JAX traces: a program that one test has traced is not traced again by the next, which runs it nevertheless.
TRACED = ("jswa/exec/",)
_NO_LAW = ("jswa/sched/steplog.py",)  # it only logs

_HOST = ("tests/unit/sched", "tests/unit/cache", "tests/property")
_DEVICE = ("tests/unit/exec",)


class Room(NamedTuple):
    """Files and folders, relative to the root of the repository."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]


ROOMS = {
    "sched": Room(("jswa/sched", "jswa/plan"), _HOST),
    "cache": Room(("jswa/cache",), _HOST),
    "indices": Room(
        (
            *("jswa/exec/pack.py", "jswa/exec/launches.py", "jswa/exec/buckets.py", "jswa/exec/programs/indices.py"),
            *("jswa/exec/programs/pages.py", "jswa/exec/programs/state.py", "jswa/exec/programs/transfer.py"),
        ),
        _DEVICE,
    ),
    "sampler": Room(
        (
            *("jswa/exec/programs/sampling.py", "jswa/exec/programs/extras.py", "jswa/exec/programs/logprobs.py"),
            *("jswa/exec/programs/verify.py", "jswa/exec/programs/drafts/draws.py"),
            "jswa/exec/programs/drafts/lookup.py",
        ),
        _DEVICE,
    ),
    "parsers": Room(
        (
            *("jswa/text/answers", "jswa/text/patterns", "jswa/text/assembler.py", "jswa/text/detokenizer.py"),
            *("jswa/text/guard.py", "jswa/text/special_tokens.py", "jswa/text/stop_strings.py"),
            *("server/text/blocks.py", "server/text/items.py", "server/text/parts.py"),
        ),
        (
            *("tests/unit/text", "tests/unit/server/text/test_parts.py"),
            *(f"tests/unit/server/api/test_{name}.py" for name in ("answers", "anthropic", "responses")),
        ),
    ),
}


def sources(room: str, root: Path) -> list[str]:
    """Return the files of a room that exist below `root`, in order."""
    found: set[Path] = set()
    for name in ROOMS[room].sources:
        path = root / name
        found |= set(path.rglob("*.py")) if path.is_dir() else {path} & set(path.parent.glob("*.py"))
    return sorted({path.relative_to(root).as_posix() for path in found} - set(_NO_LAW))


def tests(room: str, root: Path) -> list[str]:
    """Return the files and folders of a room's tests that exist below `root`."""
    return [name for name in ROOMS[room].tests if (root / name).exists()]
