"""What lookups would have drafted, told from the texts alone (jswa/sched/drafts/watch.py)."""

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jswa.sched.drafts.choice import DraftChoice
from jswa.sched.drafts.watch import Hits, Watch
from jswa.sched.rows import Rows
from tests.support.builders import share


def watched(prompt: list[int], said: list[int], reference: list[int] | None = None) -> list[bool]:
    """The hits of a row that has said this behind its prompt."""
    rows, watch = Rows(1, 7), Watch(1)
    rows.set_known(0, np.array(prompt, np.int32))
    watch.begin(0, np.array(prompt, np.int32), None if reference is None else np.array(reference, np.int32))
    for token in said:
        rows.append_one(0, token)
    return hits_of(watch, rows)


def hits_of(watch: Watch, rows: Rows) -> list[bool]:
    """What was compared of the only row."""
    hits = watch.hits(rows, np.arange(1))
    return hits.right[0, -hits.compared[0] :].tolist() if len(hits.row_ids) else []


def test_a_text_that_repeats_itself_would_be_drafted() -> None:
    """Behind three tokens that stood before; the first two that are said have fewer before them."""
    text = list(range(20, 32))
    assert watched(text, text) == [False, *[True] * 9]
    assert watched(text, [*text[:6], 99, *text[7:]]) == [False, True, True, True, False, *[False] * 3, True, True]
    assert not any(watched(text, list(range(60, 72))))


def test_tokens_that_never_stood_there_would_not_be_drafted() -> None:
    """Nor token 0, whose bits are those of an empty table."""
    assert watched([5, 6, 7], [0] * 6) == [False] * 4


def test_an_earlier_text_would_be_drafted() -> None:
    hits = watched([1, 2, 3], [4, 5, 6, 7, 8, 10], reference=[2, 3, 4, 5, 6, 7, 9])
    assert hits == [True, True, False, False]


def test_only_new_tokens_are_compared() -> None:
    """And at most the last 64."""
    rows, watch, text = Rows(1, 7), Watch(1), np.arange(3, 23, dtype=np.int32)
    rows.set_known(0, text)
    watch.begin(0, text, None)
    counts = []
    for length in (3, 10, 100, 1):
        for token in range(length):
            rows.append_one(0, token)
        counts.append(len(hits_of(watch, rows)))
    assert counts == [0, 11, 64, 0]


def test_rows_are_compared_together() -> None:
    """Each with its own texts, over as many tokens as it has got; rows with few new tokens wait."""
    rows, watch = Rows(4, 7), Watch(4)
    prompts = [list(range(50 * row, 50 * row + 30)) for row in range(4)]
    for row, prompt in enumerate(prompts):
        rows.set_known(row, np.array(prompt, np.int32))
        watch.begin(row, np.array(prompt, np.int32), None)
    for row, said in enumerate([prompts[0][:20], prompts[0][:8], prompts[2][:3], prompts[3][:12]]):
        for token in said:
            rows.append_one(row, token)
    hits = watch.hits(rows, np.arange(4))
    assert (hits.row_ids.tolist(), hits.compared.tolist()) == ([0, 1, 3], [18, 6, 10])
    assert hits.right.sum(axis=1).tolist() == [17, 0, 9]
    assert not hits.right[2, :8].any(), "tokens that were not compared are not right"
    for token in prompts[0][:8]:  # this row says again what it has said
        rows.append_one(1, token)
    assert watch.hits(rows, np.arange(4)).right.sum(axis=1).tolist() == [5]


@share(2)
@given(
    texts=st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=60), min_size=2, max_size=2),
    looks=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), min_size=1, max_size=4),
    rng=st.randoms(use_true_random=False),
)
def test_few_rows_are_compared_like_many(
    texts: list[list[int]], looks: list[tuple[int, int]], rng: random.Random
) -> None:
    """Two rows by loops; the same two among rows that have said nothing by calls of numpy."""
    few, many = (Rows(2, 7), Watch(2)), (Rows(5, 7), Watch(5))
    for rows, watch in (few, many):
        for row, text in enumerate(texts):
            rows.set_known(row, np.array(text, np.int32))
            watch.begin(row, np.array(text, np.int32), None)
    for said in looks:
        for row, count in enumerate(said):
            for token in rng.choices(range(4), k=count):
                few[0].append_one(row, token)
                many[0].append_one(row, token)
        for one, other in zip(few[1].hits(few[0], np.arange(2)), many[1].hits(many[0], np.arange(5)), strict=True):
            np.testing.assert_array_equal(one, other)


def test_the_choice_of_no_drafts_holds_while_nothing_is_found() -> None:
    """Rows that have begun just now are chosen for anew: of them less has been compared."""
    choice, ids, none = (
        DraftChoice(2, watched=True),
        np.arange(2),
        Hits(np.arange(2), np.zeros((2, 16), bool), np.full(2, 16)),
    )
    choice.took(2, 0, 1e-3)
    for looks in range(6):
        for _ in range(40):
            if not choice.rests(2):
                break
        choice.watched(none)
        assert choice.is_due == (looks < 1), "the first choice holds for fewer steps"
        if choice.is_due:
            assert choice.choose(ids, 2, (1, 3, 7)) == 0
    choice.begin(1)
    while choice.rests(2):
        pass
    choice.watched(none)
    assert choice.is_due
    assert choice.chances(ids).first.max() < 0.02


def test_hits_make_a_row_draft() -> None:
    """No step is spent on trials while hits are rare; as soon as they are many, drafts are tried, and then chosen."""
    choice, ids = DraftChoice(1, watched=True), np.arange(1)
    times = {0: 1e-3, 1: 1.1e-3, 3: 1.2e-3, 7: 1.5e-3}

    def run(hits: list[bool]) -> list[int]:
        found = []
        for _ in range(400):
            kept = 0 if choice.rests(1) else choice.kept(1)
            if kept is None:
                if not choice.last:
                    choice.watched(Hits(ids, np.array([hits]), np.array([len(hits)])))
                kept = choice.choose(ids, 1, (1, 3, 7))
            if kept:
                choice.note(ids, np.array([kept]), np.array([kept if hits[0] else 0]))
            choice.took(1, kept, times[kept])
            found.append(kept)
        return found

    run([False] * 16)
    assert not any(run([False] * 16))
    assert run([True] * 16)[-100:].count(7) > 90
