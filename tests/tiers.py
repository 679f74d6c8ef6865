"""The tests that run with a change only if it touches what they test: kernels, the model, the server and more.

All others run with every change, and these every night. A tier's sources are compared with those of its last pass:
tests/passed.txt has a digest of them, which `make test-kernels` and its like write. Whoever changes a kernel runs its
tests and commits the line; else the next `make test` runs them.

    python -m tests.tiers                prints the marker expression of `make test`, and why on stderr
    python -m tests.tiers changed        prints the tiers that must run
    python -m tests.tiers passed TIER…   writes that these passed
"""

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PASSED = ROOT / "tests" / "passed.txt"
ELSEWHERE = "not nightly and not scale and not triton"  # pyproject.toml has the same


@dataclass(frozen=True)
class Tier:
    """Tests that a change of `sources` may break, and no other.

    Attributes:
        sources: files and folders, from the root of the repository.
        tests: the same, of tests; they are sources too.
        always: tests among them that run with every change, since other files break them.
    """

    sources: tuple[str, ...]
    tests: tuple[str, ...]
    always: tuple[str, ...] = ()

    def has(self, test: str) -> bool:
        """Return whether a test file, as a path from the root, is of this tier."""
        return test.startswith(self.tests) and not test.startswith(self.always or "\0")


_KERNELS = (
    *("pallas_kernels/", "jswa/kernels.py", "jswa/exec/programs/", "jswa/forms/", "jswa/model/", "jswa/ribs/"),
    "tools/cases/",
    "requirements.lock",
)
_TEXT = (
    *("jswa/text/", "jswa/grammar/", "jswa/gguf/", "jswa/assets/", "jswa/plan/", "jswa/errors.py", "jswa/types.py"),
    *("jswa/storage/json_object.py", "jswa/storage/checkpoint_files.py", "tests/support/text/", "requirements.lock"),
)
TIERS = {
    "kernels": Tier(  # which are interpreted
        sources=(
            *_KERNELS,
            *("jswa/exec/selfcheck/", "jswa/exec/compile/store.py", "tests/support/kernels/"),
        ),
        tests=("tests/unit/pallas_kernels/", "tests/e2e/kernels/", "tests/unit/exec/test_selfcheck.py"),
    ),
    "model": Tier(  # whose programs are compiled one by one
        sources=(
            *(*_KERNELS, "jswa/architecture/", "jswa/cache/", "jswa/exec/", "jswa/storage/"),
            *("jswa/running/assembly.py", "jswa/running/staging.py", "jswa/text/inputs.py"),
            *("tests/parity/", "tests/support/checkpoints/", "tests/support/drafts/", "tests/support/positions/"),
            *("jswa/sched/constraint.py", "jswa/speculation.py", "jswa/options/", "jswa/images/"),
            *("jswa/config.py", "jswa/plan/", "tools/programs/", "tests/support/oracles.py"),
        ),
        tests=("tests/unit/model/", "tests/unit/parity/", "tests/unit/exec/", "tests/unit/tools/programs/"),
    ),
    "engine": Tier(  # whole engines: models, prefixes, drafts, training, images, numbers, several devices
        sources=(
            *(*_KERNELS, "jswa/architecture/", "jswa/engine.py", "jswa/exec/", "jswa/grammar/", "jswa/rl/"),
            *("jswa/cache/", "jswa/images/", "jswa/kv_events/", "jswa/options/", "jswa/running/", "jswa/sched/"),
            "jswa/storage/",
            *("jswa/speculation.py", "tests/parity/", "tests/support/drafts/", "tests/support/oracles.py"),
        ),
        tests=(
            *("tests/e2e/images/", "tests/e2e/model/", "tests/e2e/numerics/", "tests/e2e/prefix/", "tests/e2e/rl/"),
            "tests/e2e/speculation/",
        ),
        # They pass the server and a command too.
        always=tuple(f"tests/e2e/model/test_{name}.py" for name in ("lora", "lora_loading", "kv_dtype")),
    ),
    "text": Tier(  # templates, answers and grammars, without an engine
        sources=(*_TEXT, "docs/structured-outputs.md", "tests/support/checkpoints/text_folders.py"),
        tests=("tests/unit/text/", "tests/unit/grammar/", "tests/property/test_grammars.py"),
    ),
    "server": Tier(  # the server, with a fake engine
        sources=(
            *(*_TEXT, "server/", "jswa/frontend/", "jswa/images/", "jswa/options/", "jswa/commands/options/"),
            *("jswa/commands/server_package.py", "jswa/config.py", "jswa/env.py", "jswa/kernels.py", "jswa/stages.py"),
            *("jswa/ribs/table.py", "jswa/running/turnover.py", "jswa/cache/view.py", "jswa/cache/prefix/stats.py"),
            *("jswa/sched/constraint.py", "jswa/sched/outputs.py", "jswa/sched/steplog.py"),
            *("tests/support/server/", "tests/support/attacks/", "docs/serving.md"),
        ),
        tests=("tests/unit/server/",),
        always=("tests/unit/server/core/test_clocks.py",),  # it looks at all files
    ),
    "tools": Tier(
        sources=("tools/", "benchmarks/", "requirements.lock"),
        tests=("tests/unit/tools/", "tests/unit/benchmarks/", "tests/e2e/benchmarks/"),
        # They look at docs/, and at the length of a step's code. Programs are of the tier "model".
        always=("tests/unit/benchmarks/published/", "tests/unit/tools/programs/", "tests/unit/tools/reading/"),
    ),
}


def tier_of(test: str) -> str | None:
    """Return the tier of a test file, given as a path from the root; None: it runs with every change."""
    return next((name for name, tier in TIERS.items() if tier.has(test)), None)


def digest(tier: Tier, root: Path = ROOT) -> str:
    """Return a digest of the names and contents of a tier's files that git tracks or does not ignore.

    Raises:
        CalledProcessError: `root` is no checkout.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *tier.sources, *tier.tests]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True).stdout
    found = hashlib.sha256()
    for name in sorted({os.fsdecode(name) for name in listed.split(b"\0") if name}):
        path = root / name
        if path.is_file():  # a file deleted since the last commit is still listed
            found.update(f"{name}\0{path.stat().st_size}\0".encode())
            found.update(path.read_bytes())
    return found.hexdigest()[:32]


def passed(file: Path = PASSED) -> dict[str, str]:
    """Return the digest of each tier's last pass."""
    lines = file.read_text().splitlines() if file.exists() else []
    return dict(line.split() for line in lines if line and not line.startswith("#"))


def changed(root: Path = ROOT) -> list[str]:
    """Return the tiers whose sources are not those of their last pass. All of them outside of a checkout."""
    before = passed(root / PASSED.relative_to(ROOT))
    try:
        return [name for name, tier in TIERS.items() if before.get(name) != digest(tier, root)]
    except (subprocess.CalledProcessError, FileNotFoundError):
        return list(TIERS)


def write_passed(names: list[str], root: Path = ROOT) -> None:
    """Write that these tiers passed with the sources that they have now. Raises KeyError for an unknown tier."""
    file = root / PASSED.relative_to(ROOT)
    lines = passed(file) | {name: digest(TIERS[name], root) for name in names}
    head = "# The sources with which each tier's tests last passed: tests/tiers.py writes and reads this.\n"
    file.write_text(head + "".join(f"{name} {lines[name]}\n" for name in sorted(lines)))


def expression(must_run: list[str]) -> str:
    """Return pytest's marker expression: all tests but those of other targets and of tiers that need not run."""
    return " and ".join([ELSEWHERE, *(f"not {name}" for name in TIERS if name not in must_run)])


def main(arguments: list[str]) -> None:
    """Answer one of the commands above."""
    match arguments:
        case []:
            now = changed()
            for name in TIERS:
                why = "have changed" if name in now else f"are those of the last pass: make test-{name} runs them"
                print(f"the sources of {name} {why}", file=sys.stderr)
            print(expression(now))
        case ["changed"]:
            print(*changed())
        case ["passed", *names] if names:
            write_passed(names)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
