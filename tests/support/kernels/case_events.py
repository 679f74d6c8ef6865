"""A pytest plugin for `benchmarks.gpu.supervise`: it writes what happens to each case to a file, as it happens.

    pytest -p tests.support.kernels.case_events --case-events FILE [--case-shard 1/4] ...

Each line is a JSON object with `event`: "found" (ids of all cases of the shard), "begin", "end" (outcome, seconds,
why). Cases that FILE has already seen begin are left out, so that a run can be taken up after a case that has killed
it. After a failed case the GPU runs a small program; if it cannot, an illegal address has poisoned this process, which
then exits with status 70.
Nothing here may import jax before conftest has set its environment.
"""

import json
from pathlib import Path
from typing import Any

import pytest

POISONED = 70
_failed: dict[str, str] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    parser.addoption("--case-events", type=Path, required=True, help="file to append events to")
    parser.addoption("--case-shard", default="0/1", help="I/N: every N-th case, from the I-th")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the cases of the shard that have not begun in an earlier process."""
    index, count = map(int, config.getoption("--case-shard").split("/"))
    path: Path = config.getoption("--case-events")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    begun = {event["case"] for event in map(json.loads, lines) if event["event"] == "begin"}
    shard = items[index::count]
    _write(config, event="found", cases=[item.nodeid for item in shard])
    items[:] = [item for item in shard if item.nodeid not in begun]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Write that a case begins."""
    _write(item.config, event="begin", case=item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Write how a case has ended: with its call, or with a setup that failed or was skipped."""
    report: pytest.TestReport = yield
    if report.when == "call" or (report.when == "setup" and not report.passed):
        why = "" if report.passed else str(call.excinfo.value if call.excinfo else report.longrepr)
        _write(item.config, event="end", case=item.nodeid, outcome=report.outcome, seconds=report.duration, why=why)
        if report.failed:
            _failed[item.nodeid] = why
    return report


def pytest_runtest_logfinish(nodeid: str) -> None:
    """End the process if a failed case has left a GPU that computes nothing any more."""
    if _failed.pop(nodeid, None) is not None and not _computes():
        pytest.exit("the GPU computes nothing any more", returncode=POISONED)


def _computes() -> bool:
    import jax
    import jax.numpy as jnp

    try:
        return float(jnp.arange(4.0).sum()) == 6
    except jax.errors.JaxRuntimeError:
        return False


def _write(config: pytest.Config, **event: Any) -> None:
    with config.getoption("--case-events").open("a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")
