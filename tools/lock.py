"""Write requirements.lock anew, or print the part of it that some extras need.

    python tools/lock.py write UV                  resolve pyproject.toml with the program UV
    python tools/lock.py select core build chat    requirements for `pip install --no-deps --require-hashes -r`

One resolution covers every extra and every dependency group of pyproject.toml. The comment above a package names the
extras and groups that need it; `core` is jswa without extras. The lock has hashes of wheels only, for the Pythons in
`_PYTHON` and the platforms in `_PLATFORM`: nothing is built from source. It names no package index: pip uses the one
that the user has configured.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
_HEADER = "# Made by `make lock`; tools/lock.py explains it.\n"
_PYTHON = re.compile(r"py3-none|cp31[234]-cp31[234]|cp31[234]-none|cp3\d+-abi3")
_PLATFORM = re.compile(r"any|manylinux.*_(x86_64|aarch64)|macosx_.*_(arm64|universal2)")
_LINUX = "sys_platform == 'linux'"


def write(uv: str) -> str:
    """Resolve pyproject.toml and return the text of the lock."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(ROOT / "pyproject.toml", folder)
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
        _run(uv, folder, "lock")
        needed_by: dict[str, list[str]] = {}
        choices = {"core": [], **{extra: ["--extra", extra] for extra in project["project"]["optional-dependencies"]}}
        choices |= {group: ["--only-group", group] for group in project["dependency-groups"]}
        for choice, options in choices.items():
            for line in _export(uv, folder, *options):
                names = needed_by.setdefault(line, [])
                if "core" not in names or choice in project["dependency-groups"]:
                    names.append(choice)
        hashes = _hashes(folder / "uv.lock")
    return _HEADER + "".join(
        f"# {' '.join(names)}\n" + " \\\n".join([line, *hashes[line.partition("==")[0]]]) + "\n"
        for line, names in sorted(needed_by.items())
    )


def select(choices: list[str]) -> str:
    """Return the lock's requirements that at least one of the extras or groups needs. Exit if the lock lacks a name."""
    _, *entries = LOCK.read_text(encoding="utf-8").split("\n# ")
    parts = [
        (set(names.split()), requirement) for names, _, requirement in (entry.partition("\n") for entry in entries)
    ]
    unknown = set(choices).difference(*(names for names, _ in parts))
    if unknown:
        raise SystemExit(f"requirements.lock has no {' '.join(sorted(unknown))}")
    return "".join(requirement + "\n" for names, requirement in parts if names & set(choices))


def _run(uv: str, folder: Path, *words: str) -> str:
    command = [uv, *words, "--quiet", "--system-certs", "--project", str(folder), "--python", sys.executable]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _export(uv: str, folder: Path, *options: str) -> list[str]:
    """Return `name==version`, with `; sys_platform == 'linux'` for packages that only Linux has."""
    words = ["--frozen", "--no-hashes", "--no-header", "--no-annotate", "--no-emit-project", *options]
    pairs = (line.split(" ; ") for line in _run(uv, folder, "export", *words).splitlines())
    # The other markers that uv writes are true wherever the lock can be used.
    return [name if "darwin" in marker else f"{name} ; {_LINUX}" for name, marker in pairs]


def _hashes(lock: Path) -> dict[str, list[str]]:
    packages = tomllib.loads(lock.read_text(encoding="utf-8"))["package"]
    return {
        package["name"]: sorted(
            f"    --hash={wheel['hash']}" for wheel in package.get("wheels", []) if fits(wheel["url"].rsplit("/", 1)[1])
        )
        for package in packages
    }


def fits(wheel: str) -> bool:
    """Return whether a wheel of this file name suits a Python and a platform of the lock."""
    python, abi, platform = wheel.removesuffix(".whl").rsplit("-", 3)[1:]
    tags = [f"{tag}-{abi}" for tag in python.split(".")]
    return any(map(_PYTHON.fullmatch, tags)) and any(map(_PLATFORM.fullmatch, platform.split(".")))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write", uv]:
            LOCK.write_text(write(uv), encoding="utf-8")
        case ["select", *choices]:
            print(select(choices), end="")
        case _:
            raise SystemExit(__doc__)
