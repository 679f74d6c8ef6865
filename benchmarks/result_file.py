"""Result files: JSON with a header, one row per line, floats with four significant digits.

The header names what the figures rest on: command, commit, date, CPU, load average and versions.
"""

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
COMMIT = "RESULT_COMMIT"  # environment variable: the commit of sources that were copied without their repository
_LOAD_AT_START = os.getloadavg()  # what else the machine had to do: this module is imported before anything is measured
_PACKAGES = ("jswa", "jax", "numpy", "torch", "transformers")
_OUTPUT_OPTIONS = ("--json", "--plot", "--out")


def write(path: Path, results: dict[str, Any], header: dict[str, Any] | None = None) -> None:
    """Write `results` behind a header, which is by default that of the running process (`about`)."""
    content = rounded({**(about() if header is None else header), **results})
    lines = [f"{json.dumps(str(key))}: {_text(value, '')}" for key, value in content.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """Return the header and the results of a file, or an empty dict if there is no such file."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def about() -> dict[str, Any]:
    """Return the header for results that this process has measured.

    The commit is that which the environment names (`COMMIT`), or git's, which ends in "-dirty" if tracked files other
    than results differ from it. Commit and CPU model are None if they are unknown.
    """
    packages = {name: sys.modules[name] for name in _PACKAGES if name in sys.modules}
    return {
        "command": _command(),
        "commit": _commit(),
        "date": date.today().isoformat(),
        "cpu": _cpu_model(),
        "cpus": os.cpu_count(),
        "load_average": {"start": _LOAD_AT_START, "end": os.getloadavg()},
        "versions": {
            "python": platform.python_version(),
            **{name: getattr(module, "__version__", None) for name, module in packages.items()},
        },
    }


def rounded(value: Any) -> Any:
    """Return the value with each float in it rounded to four significant digits."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _text(value: Any, indent: str) -> str:
    """Format a value on one line; break it only if there is a table (a list of objects) in it."""
    if not _has_table(value):
        return json.dumps(value, ensure_ascii=False)
    inner = indent + " "
    if isinstance(value, dict):
        lines = [f"{inner}{json.dumps(str(key))}: {_text(each, inner)}" for key, each in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + _text(each, inner) for each in value) + f"\n{indent}]"


def _has_table(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_table, value.values()))
    return isinstance(value, list) and any(isinstance(each, dict) for each in value)


def _command() -> str:
    """Return the command line without the names of output files."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    words, rest = [], iter(sys.argv[1:])
    for word in rest:
        if word in _OUTPUT_OPTIONS:
            next(rest, None)
        elif word.partition("=")[0] not in _OUTPUT_OPTIONS:
            words.append(word)
    return shlex.join(["python", "-m", spec.name if spec else Path(sys.argv[0]).stem, *words])


def _commit() -> str | None:
    if given := os.environ.get(COMMIT):
        return given
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    commit = _git("rev-parse", "--short", "HEAD")
    return f"{commit}-dirty" if commit and changed else commit


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _cpu_model() -> str | None:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, None) or platform.processor() or None
