"""Settings of the whole test run. They must be in place before anything imports jax."""

import gc
import os
import resource
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

from jswa.env import flags_for_compiling
from tests.tiers import ROOT, tier_of

PROGRAM_DAYS = 14  # a compiled program that no test has read for so long is deleted
PROGRAM_BYTES = 1 << 31  # a test process in `make nightly` would grow to 6 GB of programs
forgotten_at = 0  # bytes that this process had when it last forgot its programs


def program_folder() -> Path:
    """Return the folder of compiled programs, which all clones of a user share; TEST_PROGRAMS names another one.

    Loading a program runs it: raises PermissionError if another user owns the folder or may write to it.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("TEST_PROGRAMS") or home / "jswa-tests" / "programs").absolute()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder}: compiled programs are run, so only you may own and write to their folder")
    return folder


for name in [name for name in os.environ if name.startswith("JSWA_")]:
    del os.environ[name]

# Environment variables, not jax.config: conftest imports no jax, and the processes that tests start behave alike.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = flags_for_compiling(os.environ.get("XLA_FLAGS", ""))  # tests of kernels make no engine first

# Compiled programs are shared by test processes, runs and clones: those of the engine, and those of tests that jit.
# The engine's own store is off: a test that changes code, or counts what is traced, must not get a program from it.
PROGRAMS = program_folder()
os.environ["JSWA_COMPILATION_CACHE"], os.environ["JAX_COMPILATION_CACHE_DIR"] = "", str(PROGRAMS)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# Compiling takes most of the time, so XLA optimises only in tests marked `optimized`, in `make nightly`, and on a GPU.
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
else:  # a GPU would multiply float32 in TF32, and miss every tolerance
    os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
QUICK = os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS", "0")

# Interpreted Mosaic kernels block a thread of XLA's pool per warpgroup, and a few more: a pool of two deadlocks.
os.environ.setdefault("PJRT_NPROC", str(max(8, os.cpu_count() or 1)))

# The engine never promotes silently. Two libraries do, and need `jax.numpy_dtype_promotion
# ("standard")` around them: flax's norm layers and attention in bfloat16, optax's Adam with a
# schedule. Every other flax layer and all of flax in float32 pass.
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

settings.register_profile("types", max_examples=40, stateful_step_count=20, deadline=None)
settings.register_profile("ci", max_examples=100, deadline=None)
settings.register_profile("nightly", max_examples=250, stateful_step_count=100, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# `make test-types` checks annotated shapes and dtypes; other runs and production do not pay for it. Left out are the
# modules that users call (types, config, llm, cli): they must refuse wrong types themselves, with jswa's own errors.
if os.environ.get("CHECK_TYPES") == "1":
    install_import_hook(
        [
            "jswa.cache",
            "jswa.sched",
            "jswa.exec",
            "jswa.forms",
            "jswa.model",
            "jswa.engine",
            "jswa.text.tokenizer",
            "jswa.text.detokenizer",
            "pallas_kernels",
        ],
        "beartype.beartype",
    )


@pytest.hookimpl(tryfirst=True)  # before the plugins of hypothesis and xdist read the option
def pytest_configure(config: pytest.Config) -> None:
    """Choose hypothesis's seed, which the test processes inherit, and delete programs that no test reads any more."""
    if hasattr(config, "workerinput"):
        return
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(secrets.randbelow(10**9))
    oldest = time.time() - PROGRAM_DAYS * 86_400
    for program in PROGRAMS.iterdir():
        status = program.stat()
        if max(status.st_atime, status.st_mtime) < oldest:
            program.unlink(missing_ok=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no test of a tier that is deselected: to collect it takes seconds, in each test process."""
    tier = tier_of(collection_path.relative_to(ROOT).as_posix()) if collection_path.suffix == ".py" else None
    return True if f"not {tier}" in config.option.markexpr.split(" and ") else None


@pytest.hookimpl(tryfirst=True)  # before the plugin that deselects tests by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of each tier by its name: `make test` may leave them out."""
    for item in items:
        tier = tier_of(item.path.relative_to(ROOT).as_posix())
        if tier is not None:
            item.add_marker(tier)


@pytest.hookimpl(tryfirst=True)  # before fixtures, which may compile
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let XLA optimise, here and in processes that the test starts, if the test is marked `optimized`."""
    quick = "0" if item.get_closest_marker("optimized") else QUICK
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = quick
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_disable_most_optimizations", quick == "1")


@pytest.hookimpl(trylast=True)  # after fixtures, which own programs
def pytest_runtest_teardown() -> None:
    """Forget jax's compiled programs whenever this process has grown by PROGRAM_BYTES: they can be loaded again."""
    global forgotten_at
    if resident_bytes() > forgotten_at + PROGRAM_BYTES and "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
        gc.collect()
        forgotten_at = resident_bytes()


def resident_bytes() -> int:
    """Return the memory that this process has now; 0 where the system is not Linux, which does not tell."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else 0


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print how to repeat a failure of drawn examples."""
    terminalreporter.write_line(f"hypothesis drew its examples with --hypothesis-seed={config.option.hypothesis_seed}")


class _NotInterpreted:
    """Takes the place of the interpreter on a GPU: a test that reads its counts is skipped, after the checks before."""

    def __getattr__(self, name: str) -> Any:
        pytest.skip(f"a GPU has no {name} of the interpreter")


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put Triton's interpreter in the place of jax-triton, for tests marked `triton`, unless there is a GPU."""
    if os.environ["JAX_PLATFORMS"] != "cpu":
        return _NotInterpreted()
    from tests.support.kernels import triton_interpreter

    monkeypatch.setitem(sys.modules, "jax_triton", triton_interpreter)
    triton_interpreter.READS.clear()
    return triton_interpreter


gc.set_threshold(100_000, 50, 100)  # modules of JAX hold millions of objects: fewer collections save 7 % of the time
