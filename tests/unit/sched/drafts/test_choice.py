"""How many drafts the next step runs (jswa/sched/drafts/choice.py)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jswa.sched.drafts.choice import DraftChoice
from jswa.speculation import PROGRAMS
from tests.support.builders import share

# Milliseconds of a step by drafts: `tiny` on two cores, and computed for an H200.
TIMES = {
    "tiny, 1 row": {0: 0.55, 1: 0.75, 3: 0.85, 7: 1.05},
    "tiny, 16 rows": {0: 1.5, 1: 2.6, 3: 4.4, 7: 8.4},
    "mixture, 1 row": {0: 2.5, 1: 3.9, 3: 6.2, 7: 9.7},
    "dense, 64 rows": {0: 14.8, 1: 15.0, 3: 15.9, 7: 19.5},
}
ROWS = {"tiny, 1 row": 1, "tiny, 16 rows": 16, "mixture, 1 row": 1, "dense, 64 rows": 64}


def told(
    averages: list[float], seconds: dict[int, float], *, rows: int = 0, most: int = 0, watched: bool = False
) -> DraftChoice:
    """Return a choice that knows the averages of some rows, and the times of a step of so many rows."""
    choice = DraftChoice(len(averages), watched=watched, most=most)
    choice.average[:] = averages
    for drafts, time in seconds.items():
        for _ in range(3):
            choice.took(rows or len(averages), drafts, time)
    return choice


def tokens_of(averages: list[float], each: float) -> float:
    """Return the tokens that a step gives besides one for each row, if each row has so many drafts."""
    whole, part = int(each), each % 1
    return sum(sum(a**place for place in range(1, whole + 1)) + part * a ** (whole + 1) for a in averages)


@share(2)
@given(
    averages=st.lists(st.floats(0.05, 0.999), min_size=1, max_size=9),
    seconds=st.fixed_dictionaries({drafts: st.floats(0.1, 10) for drafts in PROGRAMS}),
    others=st.integers(0, 5),
)
def test_the_best_number_gives_most_tokens_a_second(
    averages: list[float], seconds: dict[int, float], others: int
) -> None:
    """And is 0 unless drafts give more than none do; rows without drafts count too."""
    rows = len(averages) + others
    seconds = {0: 1.0, **seconds}
    best = told(averages, seconds, rows=rows).best(np.arange(len(averages)), rows, PROGRAMS)
    speed = {drafts: (rows + tokens_of(averages, drafts)) / time for drafts, time in seconds.items()}
    assert speed[best] >= max(speed.values()) * (1 - 1e-6)


def simulate(
    name: str, right_of: float, steps: int, seed: int, changes: tuple[int, float] | None = None
) -> tuple[float, float]:
    """Run decode steps whose drafts are right by chance; return tokens a second, with drafts and without.

    One step of 50 waits for other work of the machine. `changes`: from this step on the chance is another.
    """
    rng, rows = np.random.default_rng(seed), ROWS[name]
    times = {drafts: milliseconds / 1e3 for drafts, milliseconds in TIMES[name].items()}
    choice, ids = DraftChoice(rows), np.arange(rows)
    tokens = seconds = without = 0.0
    for step in range(steps):
        if changes is not None and step == changes[0]:
            right_of = changes[1]
        kept = choice.kept(rows)
        drafts = choice.choose(ids, rows, lambda: PROGRAMS) if kept is None else kept
        noise = rng.lognormal(0, 0.1) * (5 if rng.random() < 0.02 else 1)
        took = times[drafts] * noise
        right = np.zeros(rows, int)
        if drafts:
            right = np.cumprod(rng.random((rows, drafts)) < right_of, axis=1).sum(axis=1)
            choice.note(ids, np.full(rows, drafts), right)
        choice.took(rows, drafts, took)
        tokens, seconds, without = tokens + rows + right.sum(), seconds + took, without + times[0] * noise
    return tokens / seconds, rows * steps / without


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("right_of", [0.0, 0.05, 0.2])
def test_drafts_that_are_rarely_right_cost_little(name: str, right_of: float) -> None:
    """At most 3 %, over 4,000 steps, with the noise of measurements."""
    found, without = simulate(name, right_of, 4_000, seed=1)
    assert found > 0.97 * without


def test_first_steps_that_were_slow_are_measured_again() -> None:
    """Programs are slow at first. Steps without drafts are soon measured again, and drafts that do not pay end."""
    choice, ids = told([0.7], {0: 3.0}), np.arange(1)
    chosen = []
    for _ in range(300):
        kept = choice.kept(1)
        chosen.append(choice.choose(ids, 1, lambda: PROGRAMS) if kept is None else kept)
        choice.average[0] = 0.7
        choice.took(1, chosen[-1], {0: 1.0, 1: 1.8, 3: 4.7, 7: 10.7}[chosen[-1]])
    assert chosen[:90].count(3) == 90
    assert not any(chosen[-150:])


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("right_of", [0.95, 0.8, 0.65])
def test_the_choice_is_nearly_the_best(name: str, right_of: float) -> None:
    """Within 6 % of the best number of drafts, which nobody has told."""
    found, without = simulate(name, right_of, 4_000, seed=2)
    rows, times = ROWS[name], TIMES[name]
    gains = [(1 + tokens_of([right_of] * rows, drafts) / rows) * times[0] / time for drafts, time in times.items()]
    assert found > 0.94 * max(gains) * without


@pytest.mark.parametrize("name", ["tiny, 1 row", "dense, 64 rows"])
def test_rows_that_begin_to_copy_are_noticed(name: str) -> None:
    """Nothing is right for 2,000 steps, then nearly everything."""
    found, _ = simulate(name, 0.0, 6_000, seed=3, changes=(2_000, 0.9))
    without, _ = simulate(name, 0.0, 6_000, seed=3)
    assert found > 1.3 * without


def test_the_average_of_a_row_ends_with_it() -> None:
    """Another sequence in the row begins with the average of all."""
    choice = DraftChoice(2, watched=True)
    for _ in range(20):
        choice.note(np.array([0]), np.array([3]), np.array([3]))
        choice.note(np.array([1]), np.array([3]), np.array([0]))
    assert choice.average[0] > 0.95
    assert choice.average[1] < 0.05
    choice.begin(0)
    assert 0.05 < choice.average[0] < 0.5


def test_a_row_without_drafts_counts_like_one_whose_first_is_wrong() -> None:
    """And drafts after a wrong one do not count."""
    choice = DraftChoice(3)
    choice.note(np.arange(3), np.array([0, 1, 7]), np.zeros(3, int))
    assert (choice.average == choice.average[0]).all()
    assert 0.4 < choice.average[0] < 0.5


@pytest.mark.parametrize(("finding", "wanted"), [(0, 0), (4, 1), (8, 3), (16, 7)])
def test_a_step_has_room_for_the_rows_that_find_drafts(finding: int, wanted: int) -> None:
    """Right drafts for a quarter of the rows fit in the tokens of one draft per row; nothing is gained by more."""
    averages = [0.99] * finding + [0.01] * (16 - finding)
    choice = told(averages, {0: 1.0, 1: 1.3, 3: 1.8, 7: 2.6}, most=7)
    assert choice.best(np.arange(16), 16, PROGRAMS) == wanted


def test_beside_prompts_all_rows_have_as_many() -> None:
    """Two rows of 16 that find drafts get all places of a shared step, and only their own of another."""
    choice, ids = told([0.99] * 2 + [0.0] * 14, {0: 1.0, 1: 1.5}, most=7), np.arange(16)
    assert choice.best(ids, 16, (1,)) == 1
    assert choice.best(ids, 16, (1,), beside_prompts=True) == 0


def test_beside_prompts_only_measured_numbers_count() -> None:
    """Others would begin to compile the largest programs before it is known that drafts pay."""
    choice, ids = told([0.99], {0: 1.0, 1: 1.1}), np.arange(1)
    assert choice.best(ids, 1, PROGRAMS) == 7
    assert choice.best(ids, 1, PROGRAMS, beside_prompts=True) == 1


def test_nothing_is_asked_for_that_cannot_pay() -> None:
    """Numbers that a step could run are asked for only when drafts may pay: the answer may begin to compile."""
    choice, ids = DraftChoice(1, watched=True), np.arange(1)
    for _ in range(3):
        choice.took(1, 0, 1e-3)

    def never() -> tuple[int, ...]:
        raise AssertionError

    for _ in range(50):
        choice.watched({0: [False] * 8})
        assert choice.choose(ids, 1, never) == 0
    choice.watched({0: [True] * 8})
    assert choice.choose(ids, 1, lambda: (3,)) == 3


@pytest.mark.parametrize("place", range(4))
def test_steps_that_waited_do_not_count(place: int) -> None:
    """Seven slow steps of fifteen change no choice, wherever they are; a machine that is slow from now on does."""
    choice, ids = told([0.9], {0: 1.0, 1: 3.0, 3: 1.5, 7: 9.0}), np.arange(1)
    for step in range(30):
        choice.took(1, 3, 100.0 if step % 15 in range(2 * place, 2 * place + 7) else 1.5)
    assert choice.best(ids, 1, PROGRAMS) == 3
    for _ in range(8):
        choice.took(1, 3, 100.0)
    assert choice.best(ids, 1, PROGRAMS) == 0


@pytest.mark.parametrize(
    ("seconds", "average", "wanted"),
    [
        ({}, 0.08, 0),  # nothing but steps without drafts is known: each draft is expected to cost a tenth of one
        ({}, 0.15, 1),
        ({}, 0.99, 7),
        ({1: 1.01}, 0.5, 3),  # the next ones 2 % each, at least: by 1 % 7 would pay more
        ({1: 2.4}, 0.7, 0),
        ({7: 8.0}, 0.9, 0),  # 2.0 and 4.0 between
        ({7: 2.4}, 0.6, 3),
    ],
)
def test_a_time_that_is_not_known_lies_between_the_known_ones(
    seconds: dict[int, float], average: float, wanted: int
) -> None:
    """Or goes on with the line through them."""
    assert told([average], {0: 1.0, **seconds}).best(np.arange(1), 1, PROGRAMS) == wanted


def test_a_time_is_measured_again_after_a_while() -> None:
    """A number whose steps were slow once is tried again, and is chosen if it pays by then."""
    choice, ids, times = told([0.99], {0: 1.0, 7: 9.0}), np.arange(1), {0: 1.0, 1: 1.9, 3: 3.9, 7: 1.5}
    chosen = []
    for _ in range(2_400):
        kept = choice.kept(1)
        chosen.append(choice.choose(ids, 1, lambda: PROGRAMS) if kept is None else kept)
        choice.average[0] = 0.99
        choice.took(1, chosen[-1], times[chosen[-1]])
    assert 7 not in chosen[:1_000]
    assert chosen[-1_000:].count(7) > 980


@pytest.mark.parametrize(
    ("milliseconds", "average", "held"), [(0.1, 0.0, 16), (2.0, 0.0, 10), (9.0, 0.0, 4), (0.1, 0.99, 4)]
)
def test_a_choice_holds_for_steps_of_about_as_many_rows(milliseconds: float, average: float, held: int) -> None:
    """That of no drafts for 20 ms, within bounds; none for a step of half the rows."""
    seconds = {drafts: times * milliseconds / 1e3 for drafts, times in {0: 1.0, 1: 1.3, 3: 1.8, 7: 2.6}.items()}
    choice = told([average] * 16, seconds, watched=True)
    choice.choose(np.arange(16), 16, lambda: PROGRAMS)
    assert choice.kept(8) is None
    assert 1 + sum(choice.kept(9) is not None for _ in range(40)) == held


def test_steps_of_another_kind_take_another_time() -> None:
    """The times of steps without masks say nothing of those whose masks the host makes."""
    choice, ids = told([0.9], {0: 1.0, 1: 1.1, 3: 1.2, 7: 1.3}), np.arange(1)
    assert choice.choose(ids, 1, lambda: PROGRAMS) == 7
    choice.kind = "masks"
    assert choice.kept(1) is None
    assert choice.choose(ids, 1, lambda: PROGRAMS) == 0
    for drafts, seconds in {0: 1.0, 1: 2.4, 3: 4.7, 7: 9.0}.items():
        for _ in range(3):
            choice.took(1, drafts, seconds)
    assert choice.best(ids, 1, PROGRAMS) == 0
    choice.kind = None
    assert choice.best(ids, 1, PROGRAMS) == 7
