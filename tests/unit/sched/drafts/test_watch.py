"""What lookups would have drafted, told from the texts alone (jswa/sched/drafts/watch.py)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jswa.sched.drafts.choice import DraftChoice
from jswa.sched.drafts.watch import Watch
from jswa.sched.rows import Rows
from jswa.speculation import PROGRAMS
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
    return watch.hits(rows, [0]).get(0, [])


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
    hits = watch.hits(rows, range(4))
    assert {row: (len(right), sum(right)) for row, right in hits.items()} == {0: (18, 17), 1: (6, 0), 3: (10, 9)}
    for token in prompts[0][:8]:  # this row says again what it has said
        rows.append_one(1, token)
    assert {row: sum(right) for row, right in watch.hits(rows, range(4)).items()} == {1: 5}


@pytest.mark.parametrize(
    ("foretold", "wanted"),
    [
        ([], [False] + [True] * 9),
        ([(15, 18)], [False, True, False] + [True] * 6),  # one right token, and a wrong one after it
        ([(14, 17)], [False, False] + [True] * 7),  # nobody would have drafted its first token
        ([(15, 18), (20, 22)], [False, True, False, True, True, True, False, True, True]),
        ([(15, 24)], [False, False, False]),  # more tokens than a step drafts
        ([(8, 14)], [False] + [True] * 9),  # not among those that are compared
    ],
)
def test_a_text_that_was_foretold_counts_as_one_token(foretold: list[tuple[int, int]], wanted: list[bool]) -> None:
    """Its tokens take one step without drafts."""
    rows, watch, prompt = Rows(1, 7), Watch(1), np.arange(20, 32, dtype=np.int32)
    rows.set_known(0, prompt)
    watch.begin(0, prompt, None)
    for start, end in foretold:
        watch.foretold(0, start, end)
    rows.set_known(0, np.concatenate([prompt, prompt]))
    assert hits_of(watch, rows) == wanted
    rows.set_known(0, np.concatenate([prompt] * 3))
    assert len(hits_of(watch, rows)) == len(prompt), "a text counts once"


@share(2)
@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    said=st.lists(st.integers(0, 3), max_size=60),
    reference=st.none() | st.lists(st.integers(0, 3), max_size=40),
)
def test_hits_are_the_tokens_that_followed_last(
    prompt: list[int], said: list[int], reference: list[int] | None
) -> None:
    """The last place of the same three tokens counts: in the row's own text, or else in the reference."""
    text = prompt + said
    followed = {
        tuple(known[i : i + 3]): known[i + 3] for known in (reference or [], prompt) for i in range(len(known) - 3)
    }
    compared = range(len(prompt) + 2, len(text))
    wanted = [followed.get(tuple(text[i - 3 : i])) == text[i] for i in compared]
    found = watched(prompt, said, reference)
    assert found == (wanted if len(compared) >= 4 else [])


def test_hits_make_a_row_draft() -> None:
    """No step is spent on trials while there are no hits; as soon as there are, drafts are chosen."""
    choice, ids = DraftChoice(1, watched=True), np.arange(1)
    times = {0: 1e-3, 1: 1.1e-3, 3: 1.2e-3, 7: 1.5e-3}

    def run(hit: bool) -> list[int]:
        found = []
        for _ in range(400):
            kept = choice.kept(1)
            if kept is None:
                if not choice.last:
                    choice.watched({0: [hit] * 16})
                kept = choice.choose(ids, 1, lambda: PROGRAMS)
            if kept:
                choice.note(ids, np.array([kept]), np.array([kept if hit else 0]))
            choice.took(1, kept, times[kept])
            found.append(kept)
        return found

    assert not any(run(False))
    assert run(True)[-100:].count(7) > 90
    assert not any(run(False)[-100:])


def test_the_last_hits_weigh_most() -> None:
    """Each as much as a draft of a step."""
    choice = DraftChoice(3, watched=True)
    choice.watched({0: [False, False, True, True], 1: [True, True, False, False], 2: [True]})
    first, second, third = choice.average.tolist()
    assert first > second > third > 0
    once = DraftChoice(1, watched=True)
    once.note(np.arange(1), np.array([1]), np.array([1]))
    assert third == once.average[0]
