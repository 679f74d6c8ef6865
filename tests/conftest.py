"""Settings of the whole test run. They must be in place before anything imports jax or jswa."""

import os
from pathlib import Path

import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

from tests.support.turns import turn

for name in [name for name in os.environ if name.startswith("JSWA_")]:
    del os.environ[name]
# Compiled programs are shared by test processes and by runs, beside pytest's own cache.
os.environ["JSWA_COMPILATION_CACHE"] = str(Path(__file__).parent.parent / ".pytest_cache" / "programs")

# Environment variables, not jax.config: so conftest imports no jax, and the processes that tests
# start behave alike. On a GPU machine: JAX_PLATFORMS=cuda pytest -m gpu.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Interpreted Mosaic kernels block a thread of XLA's pool per warpgroup, and a few more: a pool of two deadlocks.
os.environ.setdefault("PJRT_NPROC", str(max(8, os.cpu_count() or 1)))

# The engine never promotes silently. Two libraries do, and need `jax.numpy_dtype_promotion
# ("standard")` around them: flax's norm layers and attention in bfloat16, optax's Adam with a
# schedule. Every other flax layer and all of flax in float32 pass.
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

settings.register_profile("ci", max_examples=200, deadline=None, derandomize=True)
settings.register_profile("nightly", max_examples=5_000, stateful_step_count=200, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Annotated shapes and dtypes are checked in tests only: production pays nothing. Left out are the modules that users
# call (types, config, llm, cli): they must refuse wrong types themselves, with jswa's own errors.
install_import_hook(
    ["jswa.cache", "jswa.sched", "jswa.exec", "jswa.model", "jswa.engine", "jswa.text.tokenizer", "pallas_kernels"],
    "beartype.beartype",
)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how to repeat a failure of a test that runs by turns."""
    terminalreporter.write_line(f"TEST_TURN={turn()} chooses the same cases by turns")


turn()  # before the test processes start, which inherit it
