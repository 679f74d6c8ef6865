"""How many drafts the next step runs (jswa/sched/drafts/choice.py)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jswa.sched.drafts.choice import Chances, DraftChoice, best_length
from jswa.sched.drafts.watch import Hits
from tests.support.builders import share

# Milliseconds of a step by drafts: `tiny` on two cores, and computed for an H200.
TIMES = {
    "tiny, 1 row": {0: 0.55, 1: 0.75, 3: 0.85, 7: 1.05},
    "tiny, 16 rows": {0: 1.5, 1: 2.6, 3: 4.4, 7: 8.4},
    "mixture, 1 row": {0: 2.5, 1: 3.9, 3: 6.2, 7: 9.7},
    "dense, 64 rows": {0: 14.8, 1: 15.0, 3: 15.9, 7: 19.5},
}
ROWS = {"tiny, 1 row": 1, "tiny, 16 rows": 16, "mixture, 1 row": 1, "dense, 64 rows": 64}


@share(2)
@given(
    first=st.lists(st.floats(0, 1), min_size=1, max_size=9),
    further=st.floats(0, 1),
    seconds=st.dictionaries(st.sampled_from([1, 3, 7]), st.floats(0.1, 10)),
    alone=st.integers(0, 5),
)
def test_the_best_length_gives_most_tokens_a_second(
    first: list[float], further: float, seconds: dict[int, float], alone: int
) -> None:
    """And is 0 unless drafts give clearly more than none do."""
    chances, rows = Chances(np.array(first), np.full(len(first), further)), len(first) + alone
    seconds = {0: 1.0, **seconds}
    best = best_length(chances.tokens(seconds), rows, seconds)

    def speed(drafts: int) -> float:
        each = sum(p * further**place for place in range(drafts) for p in first)
        return (rows + each) / seconds[drafts]

    assert best in seconds
    if best:
        assert speed(best) > 1.019 * speed(0)
        assert speed(best) >= max(map(speed, seconds)) - 1e-9
    else:
        assert max(map(speed, seconds)) <= 1.021 * speed(0)


def simulate(
    name: str, first: float, further: float, steps: int, seed: int, changes: tuple[int, float] | None = None
) -> tuple[float, float]:
    """Run decode steps whose drafts are right by chance; return tokens a second, with drafts and without.

    `changes`: from this step on, the chance of a first draft is another.
    """
    rng, rows, times = np.random.default_rng(seed), ROWS[name], TIMES[name]
    choice, ids = DraftChoice(rows), np.arange(rows)
    tokens = seconds = 0.0
    for step in range(steps):
        if changes is not None and step == changes[0]:
            first = changes[1]
        kept = 0 if choice.rests(rows) else choice.kept(rows)
        drafts = choice.choose(ids, rows, (1, 3, 7)) if kept is None else kept
        took = times[drafts] * rng.lognormal(0, 0.1)
        right = np.zeros(rows, int)
        if drafts:
            lucky = rng.random((rows, drafts)) < np.array([first, *[further] * (drafts - 1)])
            right = np.cumprod(lucky, axis=1).sum(axis=1)
            choice.note(ids, np.full(rows, drafts), right)
        if not choice.unmeasured:
            choice.took(rows, drafts, took / 1e3)
        tokens, seconds = tokens + rows + right.sum(), seconds + took
    return tokens / seconds, rows / times[0]


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("first", [0.0, 0.05, 0.2])
def test_drafts_that_are_rarely_right_cost_little(name: str, first: float) -> None:
    """At most 3 %, over 4,000 steps, with the noise of measurements."""
    found, without = simulate(name, first, 0.5, 4_000, seed=1)
    assert found > 0.97 * without


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize(("first", "further"), [(0.9, 0.95), (0.6, 0.9), (0.7, 0.6)])
def test_the_choice_is_nearly_the_best(name: str, first: float, further: float) -> None:
    """Within 6 % of the best number of drafts, which nobody has told."""
    found, _ = simulate(name, first, further, 4_000, seed=2)
    chances = Chances(np.full(ROWS[name], first), np.full(ROWS[name], further))
    tokens = chances.tokens(TIMES[name])
    best = max((ROWS[name] + tokens[drafts]) / time for drafts, time in TIMES[name].items())
    assert found > 0.94 * best


@pytest.mark.parametrize("name", ["tiny, 1 row", "dense, 64 rows"])
def test_rows_that_begin_to_copy_are_noticed(name: str) -> None:
    """Nothing is right for 2,000 steps, then nearly everything."""
    found, _ = simulate(name, 0.0, 0.9, 6_000, seed=3, changes=(2_000, 0.9))
    without, _ = simulate(name, 0.0, 0.9, 6_000, seed=3)
    assert found > 1.3 * without


def test_the_counts_of_a_row_end_with_it() -> None:
    """Another sequence in the row has the chances of all rows."""
    choice = DraftChoice(2)
    for _ in range(20):
        choice.note(np.array([0]), np.array([3]), np.array([3]))
        choice.note(np.array([1]), np.array([3]), np.array([0]))
    before = choice.chances(np.arange(2)).first
    assert before[0] > 0.85
    assert before[1] < 0.15
    choice.begin(0)
    assert 0.3 < choice.chances(np.arange(2)).first[0] < 0.7


@pytest.mark.parametrize(("finding", "wanted"), [(0.0, 1), (0.25, 1), (0.5, 3), (1.0, 7)])
def test_a_step_has_room_for_the_rows_that_find_drafts(finding: float, wanted: int) -> None:
    """Right drafts for a quarter of the rows fit in the tokens of one draft per row; nothing is gained by more."""
    choice, ids = DraftChoice(16, watched=True, most=7), np.arange(16)
    for step in range(60):
        kept = (0, 1, 3, 7)[step % 4]
        choice.took(16, kept, {0: 1.0, 1: 1.3, 3: 1.8, 7: 2.6}[kept] / 1e3)
        choice.note(ids, np.full(16, kept), np.full(16, kept))
    assert choice.choose(ids, 16, (1, 3, 7)) == 7
    assert choice.fitting(16, finding) == wanted


def test_a_few_rows_get_all_shared_drafts() -> None:
    """Of 16 rows with one draft each on average, two that find drafts get seven each."""
    first, further = np.array([1.0] * 2 + [0.0] * 14), np.ones(16)
    assert Chances(first, further).tokens([1])[1] == 2
    assert Chances(first, further, most=7).tokens([1])[1] == pytest.approx(14, rel=1e-6)
    assert Chances(first, further, most=7, precise=0.25).tokens([1])[1] == pytest.approx(4, rel=1e-4)


def test_one_row_gets_no_more_drafts_than_its_step_has() -> None:
    """A row that finds drafts in few steps has those of one step in each of these."""
    first, further = np.array([0.1]), np.ones(1)
    assert Chances(first, further, most=7).tokens([1, 3])[1] == pytest.approx(0.1, rel=1e-6)
    assert Chances(first, further, most=7).tokens([1, 3])[3] == pytest.approx(0.3, rel=1e-6)


def test_a_row_that_follows_a_text_again_is_noticed_at_once() -> None:
    """Behind many wrong drafts three right ones in a row say more, but not two, nor three that a wrong one follows."""
    ids = np.arange(4)
    choice = DraftChoice(4, watched=True)
    wrong = np.zeros((4, 16), bool)
    for _ in range(4):
        choice.watched(Hits(ids, wrong, np.full(4, 16)))
    right = np.array([[0, 1, 1, 1], [0, 0, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]], bool)
    choice.watched(Hits(ids, right, np.full(4, 4)))
    first = choice.chances(ids).first
    assert (first[[0, 3]] > 0.6).all()
    assert (first[[1, 2]] < 0.4).all()
