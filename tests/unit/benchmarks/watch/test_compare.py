"""Rows of the bench that watches: ratios of pairs, and what must be equal."""

import pytest

from benchmarks.watch.compare import Row, rows_of

TURNS = (10.0, 20.0, 30.0, 10.0)  # the machine's speed changes threefold from turn to turn, which no verdict sees


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ((1.1, 1.1, 1.1, 1.1), "slower"),
        ((0.9, 0.9, 0.9, 0.9), "faster"),
        ((1.1, 1.1, 1.1, 0.99), ""),  # three of four pairs agree five times in sixteen by chance
        ((1.01, 1.01, 1.01, 1.01), ""),  # all agree, on 1 %
    ],
)
def test_a_row_is_slower_only_if_its_pairs_agree_and_clearly(ratios: tuple[float, ...], verdict: str) -> None:
    here = tuple(base * ratio for base, ratio in zip(TURNS, ratios, strict=True))
    assert Row("host", "paired", TURNS, here).verdict == verdict


@pytest.mark.parametrize(("agree", "verdict"), [(13, "slower"), (12, "")])
def test_with_many_pairs_a_few_may_disagree(agree: int, verdict: str) -> None:
    here = (1.1,) * agree + (0.5,) * (18 - agree)
    assert Row("host", "paired", (1.0,) * 18, here).verdict == verdict


def test_a_ratio_is_that_of_a_pair_and_not_of_the_medians() -> None:
    row = Row("host", "paired", (10.0, 40.0, 20.0), (20.0, 40.0, 10.0))
    assert row.ratios == (2.0, 1.0, 0.5)
    assert "1.000 (0.500 to 2.000)" in row.line()
    assert row.record() == {
        "row": "host", "rule": "paired", "base": 20.0, "here": 20.0, "ratio": 1.0, "least": 0.5, "most": 2.0,
        "pairs": 3,
    }  # fmt: skip


@pytest.mark.parametrize(("here", "verdict"), [(1_000_000, "equal"), (1_000_001, "DIFFERENT")])
def test_hits_are_equal_to_the_token(here: int, verdict: str) -> None:
    row = Row("hits", "equal", (1_000_000,), (here,))
    assert row.verdict == verdict
    assert row.is_different == (verdict == "DIFFERENT")
    assert verdict in row.line()


@pytest.mark.parametrize(("here", "verdict"), [(316, ""), (317, "more"), (315, "fewer")])
def test_a_count_may_differ_and_says_so(here: int, verdict: str) -> None:
    row = Row("nodes", "counted", (316,), (here,))
    assert row.verdict == verdict
    assert not row.is_different


def test_turns_of_both_trees_are_paired_in_order() -> None:
    base, here = [{"a": 1.0, "b": 10.0}, {"a": 2.0, "b": 20.0}], [{"a": 3.0, "b": 10.0}, {"a": 4.0, "b": 20.0}]
    rows = {row.name: row for row in rows_of("paired", base, here, note="(noted)")}
    assert rows["a"].ratios == (3.0, 2.0)
    assert rows["b"].ratios == (1.0, 1.0)
    assert rows["a"].line().endswith("(noted)")
    assert rows["a"].record()["note"] == "(noted)"


def test_a_figure_of_one_tree_alone_is_an_error_of_its_row() -> None:
    rows = {row.name: row for row in rows_of("paired", [{"old": 1.0, "a": 1.0}], [{"new": 1.0, "a": 1.0}])}
    assert rows["a"].error is None
    assert rows["new"].record() == {"row": "new", "error": "not measured: the base has no such figure"}
    assert "this tree has no such figure" in rows["old"].line()
