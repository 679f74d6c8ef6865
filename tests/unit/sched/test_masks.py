"""Sampling columns, logits state and masks of rows (jswa/sched/rows.py), alone and in the scheduler."""

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Int

from jswa.cache.lease import Lease, LeaseTable
from jswa.config import Limits
from jswa.grammar.compiler import Grammars
from jswa.plan import COLUMNS, AllWords, LogitsEntry, Request, RequestOptions, RowMask, StepPlan, Words
from jswa.sched.constraint import Masks, make_constraint
from jswa.sched.rows import Rows
from jswa.sched.scheduler import Scheduler
from jswa.sched.sequence import Sequence, Status
from jswa.text.tokenizer import Tokenizer
from jswa.types import SamplingParams, StructuredOutputsParams
from tests.support.builders import make_layout
from tests.support.text.transcripts import tokenizer_of

VOCAB = 40
LAYOUT = make_layout(4, None, num_full=1, num_local=0)


@pytest.fixture(autouse=True, scope="module")
def masks_from_the_host() -> Iterator[None]:
    """The host makes the masks of all bad words and early stop tokens, as it does of those that are too many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jswa.plan.request.BANS", 0)
        yield


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
    options = RequestOptions(priority)
    return Request(name, np.array(prompt, np.int32), given_params, stop_ids, (7, 2**32 - 1), 30, options, constraint)


def make_sequence(request: Request, generated: Collection[int] = (), *, launched: int = 0) -> Sequence:
    """Return a sequence that runs, in a table of its own; it was preempted after these generated tokens."""
    rows, sequence = Rows(max_rows=3), Sequence(request, (0, 0), limit=30)
    lease = Lease(LeaseTable(make_layout(4, None, num_full=1, num_local=0), 3, 8), 0)
    for token in generated:
        sequence.append(token)
    rows.admit(request, sequence.record, lease, launched=launched, tokens=sequence.tokens)
    sequence.rows, sequence.row_id, sequence.lease, sequence.status = rows, lease.row, lease, Status.RUNNING
    return sequence


def masks_of(sequence: Sequence) -> Masks:
    """Return the masks of the sequence's table of rows."""
    assert sequence.rows is not None
    return Masks(sequence.rows)


def columns_of(sequence: Sequence) -> dict[str, Any]:
    """Return the packed sampling parameters of a running row by name."""
    assert sequence.rows is not None
    (record,) = sequence.rows.records(np.array([sequence.row_id]))
    return dict(zip(COLUMNS, record, strict=True))


def bits_of_row(entry: LogitsEntry | None) -> Int[np.ndarray, " 2"]:
    """Return the mask of a row on the device after its beginning."""
    assert entry is not None
    return entry.allowed.words(np.arange(2))


def changed(bits: Int[np.ndarray, " 2"], mask: RowMask | None) -> set[int]:
    """Change the mask of a row on the device; return the tokens that it allows."""
    if mask is not None:
        assert isinstance(mask.words, Words)
        bits[mask.words.at] = mask.words.bits
    words = bits.tolist()
    return {token for token in range(VOCAB) if words[token // 32] >> (token % 32) & 1}


def mask_at(masks: Masks, sequence: Sequence, position: int) -> RowMask | None:
    """Return the change of the mask for sampling the token at a position, if there is one."""
    changes, late = masks.changes([sequence], np.array([sequence.row_id]), np.array([position]))
    assert not late, "all tokens before the position are known, or do not matter"
    return changes[0] if changes else None


def test_columns_contain_the_sampling_parameters_and_the_prompt_length() -> None:
    """Floats and keys as their bits; top_k -1 becomes 0; a row without logits state names a row past all others."""
    params: dict[str, Any] = {"temperature": 0.5, "top_k": -1, "top_p": 0.25, "min_p": 0.125, "top_n_sigma": -1}
    sequence = make_sequence(make_request("a", [1, 2, 3], **params))
    assert masks_of(sequence).admit(sequence) is None
    columns = columns_of(sequence)
    names = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
    assert [columns[name].view(np.float32) for name in names] == [0.5, 0.25, 0.125, 1.0, 0.0, 0.0]
    assert (columns["top_k"], columns["top_n_sigma"], columns["prompt_length"]) == (0, 0, 3)
    assert (columns["key_high"], columns["key_low"].view(np.uint32)) == (7, 2**32 - 1)
    assert columns["logits_state"] >= 3
    penalties: dict[str, Any] = {"repetition_penalty": 1.5, "presence_penalty": -0.5, "frequency_penalty": 0.75}
    sequence = make_sequence(make_request("b", [1], **penalties))
    entry, columns = masks_of(sequence).admit(sequence), columns_of(sequence)
    assert [columns[name].view(np.float32) for name in names[3:]] == [1.5, -0.5, 0.75]
    assert entry is not None
    assert columns["logits_state"] == entry.row_id == sequence.row_id


@pytest.mark.parametrize(
    ("params", "prompt", "generated"),
    [
        ({"repetition_penalty": 1.5}, [33, 1, 3, 1], [7, 8]),
        ({"presence_penalty": 0.5}, [], [7, 8]),
        ({"frequency_penalty": -0.5}, [], [7, 8]),
        ({"logit_bias": {5: 2.0}}, [], []),
    ],
)
def test_a_row_that_begins_names_only_the_tokens_that_its_penalties_need(
    params: dict[str, Any], prompt: list[int], generated: list[int]
) -> None:
    """The whole prompt for a repetition penalty; of the text the part that the row does not run."""
    sequence = make_sequence(make_request("a", [33, 1, 3, 1], **params), (7, 8, 9), launched=6)
    entry = masks_of(sequence).admit(sequence)
    assert entry is not None
    assert entry.generated.tolist() == generated
    assert entry.bias_ids.tolist() == list(params.get("logit_bias", ()))
    assert entry.prompt.tolist() == prompt


def test_stop_tokens_are_forbidden_until_min_tokens() -> None:
    """The early mask holds for the first min_tokens generated tokens; then one update lifts it."""
    sequence = make_sequence(make_request("a", [1, 2, 3], min_tokens=2, stop_ids=frozenset({2, 39}), logit_bias={5: 1}))
    masks = masks_of(sequence)
    bits = bits_of_row(masks.admit(sequence))
    assert mask_at(masks, sequence, 2) is None, "a chunk inside of the prompt samples nothing"
    assert changed(bits, mask_at(masks, sequence, 3)) == set(range(VOCAB)) - {2, 39}
    assert mask_at(masks, sequence, 4) is None
    late = mask_at(masks, sequence, 5)
    assert late is not None
    assert changed(bits, late) == set(range(VOCAB))
    assert mask_at(masks, sequence, 6) is None


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
    st.lists(st.integers(0, 2), max_size=12),
    st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=4).map(tuple), min_size=1, max_size=3),
    st.integers(0, 5),
)
def test_the_last_token_of_a_bad_word_is_forbidden_exactly_after_the_others(
    prompt: list[int], text: list[int], words: list[tuple[int, ...]], minimum: int
) -> None:
    """The other tokens must all be generated ones; stop tokens are forbidden before min_tokens as well."""
    sequence = make_sequence(
        make_request(
            "a",
            prompt,
            bad_words=tuple(words),
            allowed_token_ids=[0, 1, 2, 31, 39],
            min_tokens=minimum,
            stop_ids=frozenset({1, 36}),
        )
    )
    masks = masks_of(sequence)
    bits = bits_of_row(masks.admit(sequence))
    for length in range(len(text) + 1):
        mask = mask_at(masks, sequence, len(prompt) + length)
        known = changed(bits, mask)
        so_far = text[:length]
        banned = {w[-1] for w in words if tuple(so_far[max(0, length - len(w) + 1) :]) == w[:-1]}
        banned |= {1} if length < minimum else set()
        assert known == {0, 1, 2, 31, 39} - banned
        if length < len(text):
            sequence.append(text[length])


def test_a_preempted_row_restarts_with_the_mask_of_its_known_tokens() -> None:
    """The mask depends on the tokens known at the restart, not on the position at which the row starts to run."""
    sequence = make_sequence(
        make_request("a", [1, 2], min_tokens=2, stop_ids=frozenset({0}), bad_words=((31, 32, 31),))
    )
    masks = masks_of(sequence)
    masks.admit(sequence)
    for token in (31, 32):
        sequence.append(token)
    masks.release(sequence)
    bits = bits_of_row(masks.admit(sequence))
    assert mask_at(masks, sequence, 3) is None
    assert changed(bits, mask_at(masks, sequence, 4)) == set(range(VOCAB)) - {31}


def held_to(regex: str) -> tuple[Masks, Sequence, Tokenizer]:
    """Return the masks of a sequence that is held to an expression, the sequence, and its tokenizer."""
    tokenizer = tokenizer_of(("<|end|>",))
    grammars = Grammars(tokenizer, tokenizer.vocab_size, (tokenizer.vocab_size - 1,))
    request = make_request("a", [1], structured_outputs=StructuredOutputsParams(regex=regex))
    grammar = grammars.compile(StructuredOutputsParams(regex=regex))
    constraint = make_constraint(request.params, tokenizer.vocab_size, 1, frozenset(), ())
    sequence = make_sequence(dataclasses.replace(request, grammar=grammar, constraint=constraint))
    masks = masks_of(sequence)
    masks.admit(sequence)
    return masks, sequence, tokenizer


def test_a_grammar_names_only_masks_that_differ_from_the_one_before() -> None:
    """Behind each of four letters of a to c the same tokens are allowed, until the text must end with d."""
    masks, sequence, tokenizer = held_to("[a-c]{4}d")
    allowed = list[int | None]()
    letter, last = (int(tokenizer.encode(one)[0]) for one in ("b", "d"))
    for token in (letter, letter, letter, letter, last):
        changed, forced, _ = masks.late([sequence], {sequence.row_id: []})
        assert forced == ([sequence] if token == last else [])
        words = [mask.words for mask in changed]
        assert all(isinstance(one, AllWords) for one in words)
        allowed.append(int(np.bitwise_count(words[0].bits).sum()) if words else None)
        sequence.append(token)
        assert sequence.matcher is not None
        assert sequence.matcher.accept([token])
    assert allowed == [3, None, None, None, 1]


def test_it_is_known_where_a_single_token_may_stand() -> None:
    """Behind the text and behind each draft. No token may stand behind a wrong draft, and none behind the last."""
    masks, sequence, tokenizer = held_to("[a-c]de?[a-c]d")
    letter, d, e = (int(tokenizer.encode(one)[0]) for one in ("b", "d", "e"))
    for drafts, wanted in {
        (letter, d, e): [False, True, False, False],
        (letter, d, letter, d): [False, True, False, True, False],
        (letter, e, d): [False, True, False, False],
    }.items():
        assert masks.late([sequence], {sequence.row_id: list(drafts)})[2] == {sequence.row_id: wanted}
    sequence.append(letter)
    assert sequence.matcher is not None
    assert sequence.matcher.accept([letter])
    _, forced, single = masks.late([sequence], {sequence.row_id: [d, letter]})
    assert forced == [sequence]
    assert single == {sequence.row_id: [True, False, True]}


@dataclasses.dataclass
class Steps:
    """A scheduler with one step in flight, and a device that samples token 9 for every row."""

    scheduler: Scheduler
    pending: StepPlan | None = None
    late: tuple[RowMask, ...] = ()

    def step(self) -> StepPlan | None:
        """Plan a step, apply the one before, and ask for the masks that were left out of the plan."""
        before, self.pending = self.pending, self.scheduler.plan()
        self.scheduler.tidy()
        if before is not None:
            self.scheduler.apply(before, np.full(before.num_rows, 9, np.int32))
        self.scheduler.check()
        self.late = () if self.pending is None else self.scheduler.late_masks(self.pending)[0]
        return self.pending

    def status(self, name: str) -> Status | None:
        """Return the status of a request, or None if it has ended."""
        found = self.scheduler.sequences.get(name)
        return None if found is None else found.status


def make_steps(rows: int) -> Steps:
    """Return a scheduler with plenty of pages."""
    return Steps(Scheduler(LAYOUT, Limits(30, rows, 64, LAYOUT.page_size, num_slabs=400)))


@pytest.mark.parametrize(
    "params",
    [{"repetition_penalty": 1.05}, {"logit_bias": {3: 1.0}}, {"allowed_token_ids": [9, 3]}, {"min_tokens": 2}],
)
def test_every_row_can_have_logits_state(params: dict[str, Any]) -> None:
    """A checkpoint with a repetition penalty of its own runs at all rows, and holds no other request back."""
    steps = make_steps(rows=40)
    for index in range(39):
        steps.scheduler.add(make_request(f"a{index}", [1], stop_ids=frozenset({7}), **params))
    steps.scheduler.add(make_request("plain", [1]))
    plan = steps.step()
    assert plan is not None
    assert plan.num_rows == 40
    assert len({entry.row_id for entry in plan.logits_state}) == 39
    while steps.scheduler.has_work():
        steps.step()


def test_the_mask_of_a_row_with_bad_words_comes_after_the_tokens_before() -> None:
    """The row runs in every step, like the row beside it."""
    steps = make_steps(rows=2)
    steps.scheduler.add(make_request("words", [1, 2], bad_words=((8, 9, 9, 5),)))
    steps.scheduler.add(make_request("plain", [1, 2]))
    plans = [steps.step()]
    assert plans[0] is not None
    assert plans[0].late == ()
    for _ in range(6):
        plan = steps.step()
        assert plan is not None
        assert (plan.num_rows, plan.late) == (2, (0,))
        assert not plan.masks
        assert not steps.late, "no text ends in 8, 9, 9"


def test_a_late_mask_follows_the_text() -> None:
    """The last token of a bad word is forbidden in the very step that may sample it."""
    steps = make_steps(rows=1)
    steps.scheduler.add(make_request("words", [1, 2], bad_words=((9, 9, 9),)))
    bits, allowed = np.full(2, -1), []
    for _ in range(5):
        plan = steps.step()
        assert plan is not None
        assert not plan.masks
        assert len(steps.late) <= 1
        allowed.append(9 in changed(bits, steps.late[0] if steps.late else None))
    # This device samples 9 all the same. The first step samples behind the prompt, the second behind one 9.
    assert allowed == [True, True, False, False, False]


def test_a_row_that_ends_in_the_step_before_gets_no_late_mask() -> None:
    """Its token is ignored; the row beside it gets one."""
    steps = make_steps(rows=2)
    steps.scheduler.add(make_request("ends", [1, 2], bad_words=((9, 5),), stop_ids=frozenset({9})))
    steps.scheduler.add(make_request("words", [1, 2], bad_words=((9, 5),)))
    steps.step()
    plan = steps.step()
    assert plan is not None
    assert plan.late == (0, 1)
    assert steps.status("ends") is None
    assert [mask.row_id for mask in steps.late] == [1]
