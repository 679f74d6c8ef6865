"""A plugin of pytest (`-p tools.mutants.plugin`) that runs the tests named in a file, and writes what they told.

MUTANTS names a JSON file with the `Task`; the answer is written to the file of the same name that ends in `.out`.
Random examples are the same in every run, and a failing one is not made smaller.
"""

import json
import os
import sys
import time
from collections.abc import Generator
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import pytest
from hypothesis import Phase, settings

_TOOL = 4  # of sys.monitoring: no debugger, profiler or coverage


class Task(NamedTuple):
    """What a test process shall do.

    Attributes:
        places: lines of code by file, absolute: (first, last, id). Each test tells which ids it has reached.
        order: the tests to run by node id, first ones first; None: all that are collected.
    """

    places: dict[str, list[tuple[int, int, str]]]
    order: list[str] | None = None


class Told(NamedTuple):
    """What a test has told: CPU seconds, reached ids, and whether it failed."""

    test: str
    seconds: float
    reached: list[str]
    failed: bool


class Teller:
    """Follows the tests of one process."""

    def __init__(self, task: Task, out: Path) -> None:
        self._task, self._out = task, out
        self._reached: set[str] = set()
        self._failed = False
        self._file: Path | None = None
        self._told: list[Told] = []
        if task.places:
            sys.monitoring.use_tool_id(_TOOL, "mutants")
            sys.monitoring.register_callback(_TOOL, sys.monitoring.events.LINE, self._line)
            sys.monitoring.set_events(_TOOL, sys.monitoring.events.LINE)

    def _line(self, code: CodeType, line: int) -> Any:
        here = [name for first, last, name in self._task.places.get(code.co_filename, ()) if first <= line <= last]
        self._reached.update(here)
        return None if here else sys.monitoring.DISABLE

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep the tests of the task, in its order."""
        if self._task.order is not None:
            rank = {test: index for index, test in enumerate(self._task.order)}
            config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in rank])
            items[:] = sorted((item for item in items if item.nodeid in rank), key=lambda item: rank[item.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Note what a test costs and reaches."""
        if self._task.places and item.path != self._file and "jax" in sys.modules:
            sys.modules["jax"].clear_caches()  # each file shall trace what it runs, as it does without those before it
        self._reached.clear()
        self._file, self._failed, begin = item.path, False, time.process_time()
        try:
            return (yield)
        finally:
            seconds = time.process_time() - begin
            self._told.append(Told(item.nodeid, round(seconds, 3), sorted(self._reached), self._failed))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failure, of a fixture too."""
        self._failed |= report.failed

    def pytest_sessionfinish(self) -> None:
        """Write the answer."""
        self._out.write_text(json.dumps([told._asdict() for told in self._told]), encoding="utf-8")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Follow the tests, with as many examples as conftest.py has chosen before."""
    settings.register_profile("mutants", settings(), database=None, phases=(Phase.explicit, Phase.generate))
    settings.load_profile("mutants")
    path = Path(os.environ["MUTANTS"])
    config.pluginmanager.register(Teller(Task(**json.loads(path.read_text())), path.with_suffix(".out")))
