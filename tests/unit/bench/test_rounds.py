"""The figures of conversations by round, on records made by hand."""

import importlib.util
import sys
from pathlib import Path

import pytest

from jswa.bench.conversations import Lengths, conversations
from jswa.bench.report import RequestRecord, fill_cached, tokens_of
from jswa.bench.rounds import TurnRecord, figures, plot, report, summary
from jswa.errors import ConfigError


def turn(number: int, prompt: int, cached: int | None, first: float = 0.1, repeated: int = 0) -> TurnRecord:
    """A turn with an answer of two tokens, the last of them 0.3 s after the first."""
    return TurnRecord(
        0.0,
        [first, first + 0.3],
        first + 0.3,
        prompt,
        cached,
        2,
        round=number,
        asked_tokens=2,
        repeated_tokens=repeated,
    )


def test_the_figures_of_a_round() -> None:
    failed = TurnRecord(0.0, prompt_tokens=1000, round=2, error="status 500")
    found = figures([turn(2, 100, 60, 0.1, 80), turn(2, 300, 120, 0.5, 100), failed])
    assert (found["requests"], found["prompt_tokens"], found["completion_tokens"]) == (3, 400, 4)
    assert (found["cached_tokens"], found["hit_rate"], found["repeated_rate"]) == (180, 0.45, 0.45)
    assert found["ttft_ms"]["mean"] == pytest.approx(300)
    assert found["ttft_ms"]["p90"] == pytest.approx(100 + 0.9 * 400)
    assert found["e2el_ms"]["p99"] == pytest.approx(400 + 0.99 * 400)


def test_hits_that_are_left_out_are_none_only_if_others_are_there() -> None:
    some: list[RequestRecord] = [turn(1, 10, None), turn(2, 20, 15)]
    fill_cached(some)
    assert [one.cached_tokens for one in some] == [0, 15]
    assert tokens_of(some)["hit_rate"] == 0.5
    nothing: list[RequestRecord] = [turn(1, 10, None), turn(2, 20, None)]
    fill_cached(nothing)
    assert (tokens_of(nothing)["cached_tokens"], tokens_of(nothing)["hit_rate"]) == (None, None)
    assert tokens_of([])["hit_rate"] is None


@pytest.mark.parametrize(("rounds", "lines"), [(3, 3), (20, 20), (21, 11), (200, 20)])
def test_the_table_has_few_lines_which_cover_all_rounds(rounds: int, lines: int) -> None:
    turns = [turn(number, 100, number % 7) for number in range(rounds, 0, -1)]
    found = summary(turns, conversations(1, Lengths(0, 1, 1, rounds), 0))
    assert len(found["rounds"]) == rounds
    head, *rows, total = report(turns, {**found, "turns_without_answer": 0})
    assert "hit rate" in head
    assert len(rows) == lines
    ranges = [row.split()[0].split("-") for row in rows]
    covered = [number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)]
    assert covered == list(range(1, rounds + 1))
    assert sum(int(row.split()[1]) for row in rows) == int(total.split()[1]) == rounds


def test_nothing_but_errors_can_be_shown() -> None:
    turns = [TurnRecord(0.0, round=1, error="status 500")]
    found = summary(turns, conversations(1, Lengths(0, 1, 1, rounds=2), 0))
    assert found["turns_without_answer"] == 2
    assert any("2 of 2 turns have no answer" in line for line in report(turns, found))


def test_plots_need_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("matplotlib") is not None:
        plot([turn(1, 10, None), turn(2, 20, None)], tmp_path / "unknown.png")
        plot([turn(1, 10, 0), turn(2, 20, 15, repeated=12)], tmp_path / "p.png")
        assert (tmp_path / "p.png").stat().st_size > 10_000
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[bench\]"):
        plot([], tmp_path / "p.png")
