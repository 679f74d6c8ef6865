"""Cases that are too many for each change, and nightly ones that are too many for each night.

`sample` marks all but a few nightly. As a pytest plugin (`-p tests.support.nights`, as `make nightly` has it) this
module lets nightly cases take turns: a night has one in NIGHTS of a file's parameters, and a week has all. The night
is TEST_NIGHT, or the day.
"""

import datetime
import os
from collections.abc import Generator, Sequence
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
    "tests/e2e/model/test_tensor_parallel.py": 3,
    "tests/e2e/numerics/test_deterministic.py": 4,
    "tests/e2e/numerics/test_sixteen_bits.py": 7,
    "tests/e2e/prefix/test_conversations.py": 7,
    "tests/e2e/prefix/test_kl.py": 7,
    "tests/e2e/prefix/test_late_steps.py": 7,
    "tests/e2e/prefix/test_revival.py": 7,
    "tests/e2e/rl/test_score.py": 7,
    "tests/e2e/speculation/test_forms.py": 4,
    "tests/e2e/speculation/test_model_drafters.py": 6,
    "tests/property/test_cache_churn.py": 7,
    "tests/property/tiers/test_disk_texts.py": 4,
    "tests/property/tiers/test_host_tier.py": 5,
    "tests/unit/model/test_dense_parity.py": 4,
    "tests/unit/pallas_kernels/attention/test_hopper.py::test_matrix": 5,
    "tests/unit/pallas_kernels/attention/test_paged_attention.py": 5,
    "tests/unit/pallas_kernels/attention/test_splits.py": 4,
    "tests/unit/pallas_kernels/attention/test_triton.py::test_matrix": 5,
    "tests/unit/pallas_kernels/experts/test_grouped_matmul.py": 4,
    "tests/unit/pallas_kernels/experts/test_hopper.py": 5,
    "tests/unit/pallas_kernels/experts/test_overlap.py": 5,
}


# Tests of more than a hundred seconds: a run ends late if one of them begins last.
LONG = {
    "tests/e2e/kernels/test_deterministic_kernels.py::test_bits_do_not_depend_on_what_else_runs",
    "tests/e2e/prefix/test_revival.py::test_after_a_replay_that_is_cut_short_rows_can_start_at_every_boundary",
    "tests/e2e/serve/test_serve.py::test_requests_generated_from_the_schema_are_answered_properly",
    "tests/property/tiers/test_disk_texts.py::test_many_restarts_find_no_wrong_page",
    "tests/property/tiers/test_host_tier.py::test_a_million_operations_lose_no_page_and_find_no_wrong_one",
    "tests/test_dockerfile.py::test_its_steps_build_what_it_starts",
    "tests/unit/pallas_kernels/cpu/test_sanitizers.py::test_the_kernels_are_clean_and_right",
    "tests/unit/tools/test_train_tiny.py::test_the_training_begins_like_that_of_the_shipped_weights",
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


def long_first[Case](cases: Sequence[Case], is_long: Sequence[bool], processes: int) -> list[Case]:
    """Return the cases in an order in which each of some processes begins with its share of the long ones.

    pytest-xdist gives each process as many cases in a row (`--dist worksteal`); a process without any takes others'.
    """
    long = [case for case, slow in zip(cases, is_long, strict=True) if slow]
    others = [case for case, slow in zip(cases, is_long, strict=True) if not slow]
    found: list[Case] = []
    for process in range(processes):
        own = long[process::processes]
        share = (len(cases) - len(found)) // (processes - process)  # as `WorkStealingScheduling` has it
        room = max(0, share - len(own))
        found += [*own, *others[:room]]
        others = others[room:]
    return [*found, *others]


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before marks deselect
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Deselect the nightly cases of other nights, and have the long tests begin first."""
    nightly = [item for item in items if item.get_closest_marker("nightly")]
    cases = [(item.nodeid.split("[")[0], item.nodeid.partition("[")[2]) for item in nightly]
    others = {id(item) for item, now in zip(nightly, turns(cases, night()), strict=True) if not now}
    config.hook.pytest_deselected(items=[item for item in items if id(item) in others])
    items[:] = [item for item in items if id(item) not in others]
    yield
    long = [item.nodeid.split("[")[0] in LONG for item in items]
    items[:] = long_first(items, long, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def pytest_configure() -> None:
    """Choose the night, which the test processes inherit."""
    night()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how to repeat the choice."""
    terminalreporter.write_line(f"TEST_NIGHT={night()} chooses the same nightly cases")
