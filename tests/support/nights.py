"""Cases that are too many for each change, and nightly ones that are too many for each night.

`sample` marks all but a few nightly. As a pytest plugin (`-p tests.support.nights`, as `make nightly` has it) this
module lets nightly cases take turns: a night has one in NIGHTS of a file's parameters, and a week has all. The night
is TEST_NIGHT, or the day.
"""

import datetime
import os
from collections.abc import Sequence
from typing import Any

import pytest

# Files, or tests in them, and in how many nights all of their nightly cases run. Chosen by seconds of CPU for a case.
NIGHTS = {
    "tests/e2e/benchmarks/test_gpu_rehearsal.py": 7,
    "tests/e2e/benchmarks/test_serve_stress.py": 4,
    "tests/e2e/kernels/test_deterministic_kernels.py": 4,
    "tests/e2e/kernels/test_mosaic.py": 5,
    "tests/e2e/model/test_families.py": 7,
    "tests/e2e/model/test_parity.py": 4,
    "tests/e2e/model/test_tensor_parallel.py": 4,
    "tests/e2e/numerics/test_deterministic.py": 4,
    "tests/e2e/numerics/test_sixteen_bits.py": 7,
    "tests/e2e/prefix/test_conversations.py": 7,
    "tests/e2e/prefix/test_kl.py": 7,
    "tests/e2e/prefix/test_late_steps.py": 7,
    "tests/e2e/prefix/test_revival.py": 7,
    "tests/e2e/rl/test_families.py": 7,
    "tests/e2e/speculation/test_forms.py": 4,
    "tests/e2e/speculation/test_model_drafters.py": 6,
    "tests/property/test_cache_churn.py": 7,
    "tests/property/tiers/test_disk_texts.py": 4,
    "tests/unit/model/test_dense_parity.py": 4,
    "tests/unit/pallas_kernels/attention/test_hopper.py::test_matrix": 5,
    "tests/unit/pallas_kernels/attention/test_paged_attention.py": 5,
    "tests/unit/pallas_kernels/attention/test_splits.py": 4,
    "tests/unit/pallas_kernels/attention/test_triton.py::test_matrix": 5,
    "tests/unit/pallas_kernels/experts/test_grouped_matmul.py": 4,
    "tests/unit/pallas_kernels/experts/test_hopper.py": 5,
    "tests/unit/pallas_kernels/experts/test_overlap.py": 5,
}


def sample(cases: Sequence[str], every: int, *values: Any) -> list[Any]:
    """Return pytest parameters (a case, then `values`): one in `every` runs with each change, the others nightly.

    The first ones: neighbours, as fixtures of a family share compiled programs.
    """
    few = -(-len(cases) // every)
    return [
        pytest.param(case, *values, marks=() if index < few else pytest.mark.nightly)
        for index, case in enumerate(cases)
    ]


def night() -> int:
    """Return the number of this night. Processes that this one starts get the same, from the environment."""
    today = datetime.datetime.now(datetime.UTC).date().toordinal()
    return int(os.environ.setdefault("TEST_NIGHT", str(today)))


def turns(cases: list[tuple[str, str]], number: int) -> list[bool]:
    """Return which nightly cases have their turn in a night.

    Args:
        cases: name of the test, and id of its parameters; cases of a file with equal ids share fixtures, and a turn,
            and a test without parameters has a turn of its own.
        number: of the night.
    """
    found, seen = [], dict[str, dict[str, int]]()
    for test, parameters in cases:
        key = next((key for key in (test, test.split("::")[0]) if key in NIGHTS), None)
        if key is None:
            found.append(True)
            continue
        ids = seen.setdefault(key, {})
        found.append(ids.setdefault(parameters or test, len(ids)) % NIGHTS[key] == number % NIGHTS[key])
    return found


@pytest.hookimpl(tryfirst=True)  # before marks deselect
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the nightly cases of other nights."""
    nightly = [item for item in items if item.get_closest_marker("nightly")]
    cases = [(item.nodeid.split("[")[0], item.nodeid.partition("[")[2]) for item in nightly]
    others = {id(item) for item, now in zip(nightly, turns(cases, night()), strict=True) if not now}
    config.hook.pytest_deselected(items=[item for item in items if id(item) in others])
    items[:] = [item for item in items if id(item) not in others]


def pytest_configure() -> None:
    """Choose the night, which the test processes inherit."""
    night()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how to repeat the choice."""
    terminalreporter.write_line(f"TEST_NIGHT={night()} chooses the same nightly cases")
