"""The committed digests of all programs: reads them, writes them, and says what has changed."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import jax

from tools.programs.text import ProgramText

FILE = Path(__file__).parent / "digests.json"
Digests = Mapping[str, str]  # by names of programs; see `named`


def named(configuration: str, texts: Mapping[str, ProgramText]) -> dict[str, str]:
    """Return digest and number of operations of a configuration's programs, by "CONFIGURATION: PROGRAM"."""
    return {f"{configuration}: {name}": f"{one.digest}, {one.operations} operations" for name, one in texts.items()}


def read(file: Path = FILE) -> dict[str, str]:
    """Return the committed digests."""
    digests: dict[str, str] = json.loads(file.read_text())["programs"]
    return digests


def write(found: Digests, configurations: Collection[str], file: Path = FILE) -> None:
    """Write the digests that were found; those of other `configurations`, which are all that there are, stay."""
    lowered = {_configuration(name) for name in found}
    kept = {} if not file.exists() else read(file)
    stay = {
        name: digest
        for name, digest in kept.items()
        if _configuration(name) in configurations and _configuration(name) not in lowered
    }
    content = {"jax": jax.__version__, "programs": {**stay, **found}}
    file.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def changes(found: Digests, file: Path = FILE) -> str:
    """Return which programs have changed, which have not, and how to accept it; "" if none has.

    Args:
        found: all programs of one or several configurations.
    """
    lowered = {_configuration(name) for name in found}
    committed = {name: digest for name, digest in read(file).items() if _configuration(name) in lowered}
    names = sorted({*found, *committed})
    changed = [name for name in names if found.get(name) != committed.get(name)]
    if not changed:
        return ""
    lines = [f"  {name}: {committed.get(name, 'none')} -> {found.get(name, 'none')}" for name in changed]
    same = [f"  {name}" for name in names if name not in changed]
    version = json.loads(file.read_text())["jax"]
    if version != jax.__version__:
        lines.append(f"They were lowered by jax {version}, and this is {jax.__version__}: all may have changed.")
    return "\n".join(
        [
            "These compiled programs have changed:",
            *lines,
            *(["These have not:", *same] if same else []),
            'What has changed: `python -m tools.programs show "NAME"` of both commits, and diff.',
            "If it was on purpose: `python -m tools.programs digest` (in .venv-gpu those on Triton too, which is",
            "`make program-digests`), and commit tools/programs/digests.json.",
        ]
    )


def _configuration(name: str) -> str:
    return name.rpartition(": ")[0]
