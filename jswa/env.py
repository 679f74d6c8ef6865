"""Debug switches from the environment, read once per engine. Any other JSWA_ variable is an error.

JSWA_CHECK=1                 assert every invariant of scheduler, leases and page pool after every step
JSWA_NO_OVERLAP=1            wait for each step to finish before the next step is planned
JSWA_DUMP_PLANS=FILE         write the plan of every step to FILE, for `python -m jswa.commands.trace replay FILE`
JSWA_COMPILATION_CACHE=DIR   folder for compiled programs (default ~/.cache/jswa; empty: none). It holds whole programs
                             in DIR/programs, 2 GiB at most, and deletes what was not used for 30 days; on a GPU and
                             with several hosts also what jax keeps. Kept programs are executed without verification:
                             the folder must be writable by this user only.
JSWA_AUTOTUNE_RESULTS=FILE   what XLA has measured to choose kernels of matrix products on a GPU: read if FILE exists,
                             and written as programs are compiled. As text if the name ends in .pbtxt. For machines
                             that keep no folder of compiled programs, which has the same measurements.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jswa.errors import ConfigError

NAMES = ("JSWA_CHECK", "JSWA_NO_OVERLAP", "JSWA_DUMP_PLANS", "JSWA_COMPILATION_CACHE", "JSWA_AUTOTUNE_RESULTS")


@dataclass(frozen=True)
class Switches:
    """The values of the switches."""

    check: bool = False
    overlap: bool = True
    dump_plans: Path | None = None
    compilation_cache: Path | None = None
    autotune_results: Path | None = None

    @staticmethod
    def read(environ: Mapping[str, str] = os.environ) -> "Switches":
        """Read the JSWA_ variables. Raises ConfigError for an unknown variable or a malformed value."""
        for name, value in environ.items():
            if name.startswith("JSWA_") and name not in NAMES:
                raise ConfigError(name, value, f"is not a switch; the switches are {', '.join(NAMES)}")
        dump = environ.get("JSWA_DUMP_PLANS")
        cache = environ.get("JSWA_COMPILATION_CACHE", str(Path.home() / ".cache" / "jswa"))
        results = environ.get("JSWA_AUTOTUNE_RESULTS")
        return Switches(
            check=_flag(environ, "JSWA_CHECK"),
            overlap=not _flag(environ, "JSWA_NO_OVERLAP"),
            dump_plans=Path(dump) if dump else None,
            compilation_cache=Path(cache) if cache else None,
            autotune_results=Path(results) if results else None,
        )


@contextmanager
def without_advice() -> Iterator[None]:
    """Import transformers inside: it would warn that PyTorch is missing, which jswa does not need."""
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def flags_for_autotuning(results: Path, flags: str = "") -> str:
    """Return XLA_FLAGS with which XLA reads autotuning results from a file, if it exists, and writes all it has to it.

    XLA reads them when jax makes its first backend. Flags that are in `flags` already are not repeated.
    """
    path = results.absolute()
    wanted = [f"--xla_gpu_load_autotune_results_from={path}"] if path.exists() else []
    wanted.append(f"--xla_gpu_dump_autotune_results_to={path}")
    return _joined(flags, wanted)


def flags_for_compiling(flags: str = "") -> str:
    """Return XLA_FLAGS with which XLA compiles a step for a CPU in a quarter of the memory and half the time.

    XLA's newer emitters keep a compiler context of nearly 1 MB for each kernel until the program is whole. The older
    emitters share one. XLA reads the flag when jax makes its first backend, ignores it on other devices, and will
    ignore it once the older emitters are gone. Options that the user has given to the backend stay alone.
    """
    if "--xla_backend_extra_options" in flags:
        return flags
    return _joined(flags, ["--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true"])


def _joined(flags: str, wanted: list[str]) -> str:
    given = flags.split()
    return " ".join([*given, *(flag for flag in wanted if flag not in given)])


def _flag(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name, "0")
    if value not in ("0", "1"):
        raise ConfigError(name, value, "must be 0 or 1")
    return value == "1"
