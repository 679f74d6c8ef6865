"""The rooms that mutants are drawn from, and the tests that are asked about them; all relative to the root."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PER_ROOM = 40
# Code that JAX traces: a program that one test has traced is not traced again by the next, which runs it nevertheless.
TRACED = ("jswa/exec/",)
_NO_LAW = ("jswa/sched/steplog.py",)  # it only logs

ROOMS: dict[str, tuple[str, ...]] = {
    "sched": ("jswa/sched", "jswa/plan"),
    "cache": ("jswa/cache",),
    "indices": (
        *("jswa/exec/pack.py", "jswa/exec/launches.py", "jswa/exec/buckets.py", "jswa/exec/programs/indices.py"),
        *("jswa/exec/programs/pages.py", "jswa/exec/programs/state.py", "jswa/exec/programs/transfer.py"),
    ),
    "sampler": (
        *("jswa/exec/programs/sampling/xla.py", "jswa/exec/programs/logits_state.py"),
        "jswa/ribs/logprobs/traced.py",
        *("jswa/exec/programs/sampling/verify.py", "jswa/exec/programs/drafts/draws.py"),
        "jswa/exec/programs/drafts/lookup.py",
    ),
    "parsers": (
        *("jswa/text/answers", "jswa/text/patterns", "jswa/text/assembler.py", "jswa/text/detokenizer.py"),
        *("jswa/text/guard.py", "jswa/text/special_tokens.py", "jswa/text/stop_strings.py"),
        *("server/text/blocks.py", "server/text/items.py", "server/text/parts.py"),
    ),
}

# The tests that are asked about mutants: those of these rooms, and of the engine where a room has no fake for it. Each
# entry is one process when the tests are measured.
TESTS = (
    *("tests/unit/exec", "tests/property", "tests/e2e/sampling", "tests/unit/cache", "tests/unit/sched"),
    *("tests/unit/text", "tests/unit/grammar", "tests/e2e/api/test_trace.py", "tests/unit/server/text/test_parts.py"),
    *(
        "tests/e2e/speculation/test_same_tokens.py",
        "tests/unit/ribs/test_logprobs.py",
        "tests/unit/ribs/test_images.py",
    ),
    *(f"tests/unit/server/api/test_{name}.py" for name in ("answers", "anthropic", "responses")),
)


def sources(room: str, root: Path) -> list[str]:
    """Return the files of a room that exist below `root`, in order."""
    found: set[Path] = set()
    for name in ROOMS[room]:
        path = root / name
        found |= set(path.rglob("*.py")) if path.is_dir() else {path} & set(path.parent.glob("*.py"))
    return sorted({path.relative_to(root).as_posix() for path in found} - set(_NO_LAW))


def tests(root: Path) -> list[str]:
    """Return the files and folders of TESTS that exist below `root`."""
    return [name for name in TESTS if (root / name).exists()]
