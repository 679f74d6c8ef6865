"""What a start tells (jswa/stages.py): a line after each stage, another in a long one, and bars on terminals only."""

import io
import logging
import threading
from collections.abc import Iterator

import pytest

from jswa import stages
from jswa.stages import LOG, bars, stage
from tests.support.commands.terminal import TerminalText


class Lines(logging.Handler):
    """Keeps the lines of the log, and sets an event at the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.first = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.first.set()


@pytest.fixture
def log() -> Iterator[Lines]:
    """The lines of the start's logger."""
    lines, before = Lines(), LOG.level
    LOG.addHandler(lines)
    LOG.setLevel(logging.INFO)
    yield lines
    LOG.setLevel(before)
    LOG.removeHandler(lines)


def test_a_stage_says_its_size_and_its_seconds_once_it_has_ended(log: Lines) -> None:
    with stage("weights", 3, "1.50 GiB") as done:
        done(3)
        assert not log.lines
    assert len(log.lines) == 1
    assert log.lines[0].startswith("weights: 1.50 GiB in ")


def test_a_long_stage_says_what_it_does_before_it_ends(log: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "SOON", 0.0)
    with stage("step programs", 2, "2", slow="each is compiled"):
        assert log.first.wait(60)
        assert log.lines == ["step programs: each is compiled"]
    assert len(log.lines) == 2


def test_a_stage_that_fails_says_nothing_more(log: Lines) -> None:
    with pytest.raises(KeyError), stage("weights", 1, "1 GiB"):
        raise KeyError
    assert not log.lines


@pytest.mark.parametrize(("stream", "shown", "is_there"), [(TerminalText, True, True), (TerminalText, False, False),
                                                            (io.StringIO, True, False)])  # fmt: skip
def test_a_bar_is_shown_on_a_terminal_if_bars_are_wanted(
    stream: type[io.StringIO], shown: bool, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = stream()
    monkeypatch.setattr("sys.stderr", stderr)
    with bars(shown=shown), stage("step programs", 6, "6") as done:
        done(3)
    assert ("| 0/6" in stderr.getvalue()) == is_there
    with stage("weights", 1, "1 GiB"):
        pass
    assert ("| 0/1" in stderr.getvalue()) == (stream is TerminalText), "`bars` holds inside only"
