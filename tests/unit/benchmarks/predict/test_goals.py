"""`benchmarks.predict.goals`: default kernels are those of the published figures, and the document has the tables."""

import pytest

from benchmarks import result_file
from benchmarks.predict.constants import H200
from benchmarks.predict.figures import PUBLISHED
from benchmarks.predict.goals import GOALS, Found, found, goals_table, losses_table

DOCUMENT = result_file.ROOT / "docs" / "performance.md"
C = H200.constants


@pytest.fixture(scope="module")
def rows() -> list[Found]:
    """All goals by the prediction."""
    return [found(goal, C) for goal in GOALS]


def test_with_default_kernels_goals_have_the_published_figures(rows: list[Found]) -> None:
    """So nothing of the prediction was changed for a goal."""
    published = {
        (row["model"], row["formats"], row["rows"], row["context"], row["drawing"]): row["seconds"]
        for row in result_file.read(PUBLISHED)["decode"]
    }
    for goal, default, _, _ in rows:
        key = goal.model, goal.formats, goal.load.rows, goal.load.context, goal.load.drawing
        assert default.seconds == pytest.approx(published[key], rel=1e-3)


def test_fast_kernels_change_counts_of_kernels_and_readings_alone(rows: list[Found]) -> None:
    """The roof stays; all steps become faster."""
    for _, default, fast, _ in rows:
        assert fast.roof == pytest.approx(default.roof)
        assert fast.seconds < default.seconds


def test_a_draw_on_triton_costs_a_reading_more_than_a_greedy_token(rows: list[Found]) -> None:
    """Not sixty of them, nor a random number for each token."""
    greedy, drawn = rows[0].fast.seconds, rows[1].fast.seconds
    reading = 4 * 256 * 201_088 / (C.copy * C.logits_bytes)
    assert drawn - greedy == pytest.approx(reading, rel=1e-6)


def test_the_document_has_the_tables(rows: list[Found]) -> None:
    """Made by `python -m benchmarks.predict.goals`."""
    text = DOCUMENT.read_text(encoding="utf-8")
    for table in (goals_table(rows), losses_table(rows, C)):
        assert "\n".join(table) in text
