"""Sampling columns, extras ids and masks of rows (jswa/sched/rows.py), alone and in the scheduler."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jswa.cache.lease import Lease
from jswa.config import Limits
from jswa.plan import SAMPLING, ExtrasEntry, Request, StepPlan
from jswa.sched.constraint import make_constraint
from jswa.sched.rows import RowTable
from jswa.sched.scheduler import Scheduler
from jswa.sched.sequence import Sequence, Status
from jswa.types import SamplingParams
from tests.support.fakes import make_layout

VOCAB = 40
LAYOUT = make_layout(4, None, num_full=1, num_local=0)


def make_request(
    name: str,
    prompt: list[int],
    *,
    stop_ids: frozenset[int] = frozenset(),
    bad_words: tuple[tuple[int, ...], ...] = (),
    priority: int = 0,
    **params: Any,
) -> Request:
    """Return a request with the constraint of its parameters, of at most 30 tokens."""
    given_params = SamplingParams(**params)
    constraint = make_constraint(given_params, VOCAB, len(prompt), stop_ids, bad_words)
    return Request(name, np.array(prompt, np.int32), given_params, stop_ids, (7, 2**32 - 1), 30, priority, constraint)


def make_sequence(request: Request, slot: int = 0) -> Sequence:
    """Return a sequence in a slot."""
    return Sequence(request, (0, 0), limit=30, row_id=slot, lease=Lease(8))


def allowed(entry: ExtrasEntry | None) -> set[int]:
    """Return the tokens that an entry's mask allows."""
    assert entry is not None
    return {token for token in range(VOCAB) if int(entry.mask[token // 32]) >> (token % 32) & 1}


def test_columns_contain_the_sampling_parameters_and_the_prompt_length() -> None:
    """Floats and keys as their bits; top_k -1 becomes 0; the extras id of a row without extras is past all others."""
    table = RowTable(max_rows=3, max_extras=2)
    params: dict[str, Any] = {"temperature": 0.5, "top_k": -1, "top_p": 0.25, "min_p": 0.125}
    assert table.admit(make_sequence(make_request("a", [1, 2, 3], **params), slot=2)) is None
    columns = dict(zip(SAMPLING, table.sampling[2], strict=True))
    names = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
    assert [columns[name].view(np.float32) for name in names] == [0.5, 0.25, 0.125, 1.0, 0.0, 0.0]
    assert (columns["top_k"], columns["prompt_length"]) == (0, 3)
    assert (columns["key_high"], columns["key_low"].view(np.uint32)) == (7, 2**32 - 1)
    assert columns["extras"] >= 2
    assert not table.any_extras
    penalties: dict[str, Any] = {"repetition_penalty": 1.5, "presence_penalty": -0.5, "frequency_penalty": 0.75}
    entry = table.admit(make_sequence(make_request("b", [1], **penalties), slot=2))
    columns = dict(zip(SAMPLING, table.sampling[2], strict=True))
    assert [columns[name].view(np.float32) for name in names[3:]] == [1.5, -0.5, 0.75]
    assert entry is not None
    assert columns["extras"] == entry.extras_id < 2
    assert table.any_extras


def test_extras_ids_are_distinct_and_are_freed() -> None:
    """A row without a constraint needs none; an id is freed only once."""
    table = RowTable(max_rows=4, max_extras=2)
    constrained, plain = make_request("a", [1], presence_penalty=1.0), make_request("b", [1])
    rows = [make_sequence(constrained, slot) for slot in range(2)]
    ids = [table.admit(row) for row in rows]
    assert {entry.extras_id for entry in ids if entry is not None} == {0, 1}
    assert not table.has_room(constrained)
    assert table.has_room(plain)
    other = make_sequence(plain, 2)
    table.admit(other)
    table.release(other)
    assert not table.has_room(constrained)
    for _ in range(2):
        table.release(rows[0])
    assert table.any_extras
    third = table.admit(make_sequence(constrained, 3))
    assert third is not None
    assert third.extras_id == rows[0].extras_id
    assert not table.has_room(constrained), "an id was freed twice"


def test_stop_tokens_are_forbidden_until_min_tokens() -> None:
    """The early mask holds for the first min_tokens generated tokens; then one update lifts it."""
    table = RowTable(1, 1)
    sequence = make_sequence(make_request("a", [1, 2, 3], min_tokens=2, stop_ids=frozenset({2, 39}), logit_bias={5: 1}))
    entry = table.admit(sequence)
    assert entry is not None
    assert entry.bias is not None
    assert allowed(entry) == set(range(VOCAB)) - {2, 39}
    assert [table.update(sequence, position) for position in (2, 3, 4)] == [None] * 3
    late = table.update(sequence, 5)
    assert allowed(late) == set(range(VOCAB))
    assert late is not None
    assert late.bias is None, "a new bias would reset the counts"
    assert table.update(sequence, 6) is None


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
    st.lists(st.integers(0, 2), max_size=12),
    st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=4).map(tuple), min_size=1, max_size=3),
)
def test_the_last_token_of_a_bad_word_is_forbidden_exactly_after_the_others(
    prompt: list[int], text: list[int], words: list[tuple[int, ...]]
) -> None:
    """The other tokens must all be generated ones. The mask on the device follows from the updates sent so far."""
    table = RowTable(1, 1)
    sequence = make_sequence(make_request("a", prompt, bad_words=tuple(words), allowed_token_ids=[0, 1, 2, 31, 39]))
    known = allowed(table.admit(sequence))
    for length in range(len(text) + 1):
        entry = table.update(sequence, len(prompt) + length)
        known = known if entry is None else allowed(entry)
        so_far = text[:length]
        banned = {w[-1] for w in words if tuple(so_far[max(0, length - len(w) + 1) :]) == w[:-1]}
        assert known == {0, 1, 2, 31, 39} - banned
        if length < len(text):
            sequence.append(text[length])


def test_a_preempted_row_restarts_with_the_mask_of_its_known_tokens() -> None:
    """The mask depends on the tokens known at the restart, not on the position at which the row starts to run."""
    table = RowTable(1, 1)
    sequence = make_sequence(
        make_request("a", [1, 2], min_tokens=2, stop_ids=frozenset({0}), bad_words=((31, 32, 31),))
    )
    table.admit(sequence)
    for token in (31, 32):
        sequence.append(token)
    table.release(sequence)
    assert allowed(table.admit(sequence)) == set(range(VOCAB)) - {31}


@dataclasses.dataclass
class Steps:
    """A scheduler with one step in flight, and a device that samples token 9 for every row."""

    scheduler: Scheduler
    pending: StepPlan | None = None

    def step(self) -> StepPlan | None:
        """Plan a step, then apply the one before."""
        before, self.pending = self.pending, self.scheduler.plan()
        if before is not None:
            self.scheduler.apply(before, np.full(before.num_rows, 9, np.int32))
        self.scheduler.check()
        return self.pending

    def status(self, name: str) -> Status | None:
        """Return the status of a request, or None if it has ended."""
        found = self.scheduler.sequences.get(name)
        return None if found is None else found.status


def make_steps(rows: int) -> Steps:
    """Return a scheduler with plenty of pages."""
    return Steps(Scheduler(LAYOUT, Limits(30, rows, 64, LAYOUT.page_size, num_blocks=400)))


@pytest.mark.parametrize("how", ["finished", "aborted"])
def test_a_request_waits_for_a_free_extras_id(how: str) -> None:
    """There are fewer ids than rows; the queue keeps its order, and its head gets the next free id."""
    steps = make_steps(rows=40)
    assert steps.scheduler.limits.max_extras == 32
    for index in range(32):
        steps.scheduler.add(make_request(f"a{index}", [1], presence_penalty=1.0))
    while steps.scheduler.stats().waiting:
        steps.step()
    steps.scheduler.add(make_request("late", [1], presence_penalty=1.0))
    steps.scheduler.add(make_request("plain", [1]))
    for _ in range(3):
        steps.step()
    assert steps.status("late") is Status.WAITING
    assert steps.status("plain") is Status.WAITING, "a request overtook the head of the queue"
    if how == "aborted":
        steps.scheduler.abort("a7")
        steps.step()
        assert steps.status("late") is Status.RUNNING
    while steps.scheduler.has_work():
        steps.step()
    steps.scheduler.check()  # all 32 extras ids are free again


def test_a_row_with_bad_words_runs_in_every_second_step() -> None:
    """It waits until its last token is known; the row beside it runs in every step."""
    steps = make_steps(rows=2)
    steps.scheduler.add(make_request("words", [1, 2], bad_words=((9, 9, 9),)))
    steps.scheduler.add(make_request("plain", [1, 2]))
    ran: list[int] = []
    banned: list[bool] = []
    for _ in range(8):
        plan = steps.step()
        assert plan is not None
        ran.append(plan.num_rows)
        banned += [9 not in allowed(entry) for entry in plan.extras]
    assert ran == [2, 1, 2, 1, 2, 1, 2, 1]
    assert banned == [False, True], "at the start, and after two of its tokens"
