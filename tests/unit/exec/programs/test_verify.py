"""A draft counts if the token drawn in its place is the same (jswa/exec/programs/sampling/verify.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jswa.exec.programs.drafts.draws import draw_alike
from jswa.exec.programs.drafts.propose import shares
from jswa.exec.programs.logits_state import LogitsState, count_tokens, init_logits_state
from jswa.exec.programs.sampling import verify
from jswa.exec.programs.sampling.rows import Sampling
from jswa.exec.programs.sampling.verify import ABSENT, Draws, accepted, draw, proposed
from jswa.exec.programs.sampling.xla import sample
from jswa.plan import NOT_FINITE
from jswa.ribs.traced import HOOKS
from tests.support.builders import sampling_columns

VOCAB, ROWS, PLACES, WIDTH = 50, 5, 4, 8


@pytest.mark.parametrize(
    ("draws", "drafts", "right"),
    [
        ([4, 5, 6, 7], [4, 5, 6], 3),
        ([4, 5, 6, 7], [4, 9, 6], 1),
        ([4, 5, 6, 7], [9, 5, 6], 0),
        ([4, 5, 6, 7], [4, 5, ABSENT], 2),
        ([4, NOT_FINITE, 6, 7], [4, 5, 6], 0),  # the next step finds out why, at its first token
        ([NOT_FINITE, 5, 6, 7], [ABSENT, 5, 6], 0),
    ],
)
def test_the_first_drafts_that_equal_the_draws_count(draws: list[int], drafts: list[int], right: int) -> None:
    """And none behind the first difference."""
    assert accepted(jnp.array([draws]), jnp.array([drafts])).tolist() == [right]


@pytest.mark.parametrize(
    ("rows", "places", "tokens", "logits"),
    [
        (8, 4, 32, 32), (8, 4, 16, 16), (8, 4, 999, 32),  # all places, or as many as the step has tokens
        (4096, 4, 16_384, 4096), (4096, 4, 6_000, 4096), (1024, 4, 4096, 4096), (1025, 4, 4100, 1025),
    ],
)  # fmt: skip
def test_the_logits_of_all_places_exist_at_once_or_those_of_one_place_of_each_row(
    rows: int, places: int, tokens: int, logits: int
) -> None:
    vocab = verify.LOGITS // 4096
    assert verify.logits_at_once(rows, places, vocab, tokens) == logits * vocab


def test_what_lies_behind_an_absent_draft_is_none() -> None:
    """A row may have fewer drafts than the program has room for."""
    assert proposed(jnp.array([[1, 2, 3], [1, ABSENT, 3], [ABSENT] * 3])).tolist() == [3, 1, 0]


@pytest.mark.parametrize("most", [1, 2**26])
@pytest.mark.parametrize("deterministic", [False, True])
def test_each_place_is_drawn_as_if_it_were_alone(
    monkeypatch: pytest.MonkeyPatch, most: int, *, deterministic: bool
) -> None:
    """With the key of its own position, whether the logits of all places exist at the same time or not."""
    monkeypatch.setattr(verify, "LOGITS", most)
    rng = np.random.default_rng(0)
    head = jnp.asarray(rng.standard_normal((WIDTH, VOCAB)), jnp.float32)
    hidden = jnp.asarray(rng.standard_normal((ROWS, PLACES, WIDTH)), jnp.float32)
    columns = sampling_columns(
        ROWS, temperature=np.array([0, 0.7, 1, 1, 2]), top_p=0.9, key_low=np.arange(ROWS), logits_state=ROWS
    )
    first, logits_state, seen = jnp.arange(ROWS, dtype=jnp.int32) * 10, init_logits_state(ROWS, VOCAB), set[int]()

    def logits(vectors: jax.Array) -> jax.Array:
        seen.add(len(vectors))
        return vectors @ head

    def run(hidden: jax.Array, first: jax.Array) -> Draws:
        rows, places, _ = hidden.shape
        return draw(
            logits,
            hidden,
            first,
            jnp.zeros((rows, places - 1), jnp.int32),
            Sampling.of(jnp.asarray(columns)),
            logits_state,
            jnp.ones((rows, places), bool),
            runs=jnp.ones(rows, bool),
            room=rows * places,
            vocab=VOCAB,
            devices=1,
            hooks=HOOKS["logprobs"],
            deterministic=deterministic,
        )

    whole = jax.jit(run)(hidden, first)
    assert seen == {ROWS if deterministic or most == 1 else ROWS * PLACES}, (
        "a deterministic engine draws as without drafts"
    )
    for place in range(PLACES):
        alone = run(hidden[:, place : place + 1], first + place)
        np.testing.assert_array_equal(whole.tokens[:, place], alone.tokens[:, 0])
        chosen, expected = (one.beside["logprobs"].chosen for one in (whole, alone))
        np.testing.assert_allclose(chosen[place::PLACES], expected, atol=1e-5)


def test_only_places_with_a_token_are_drawn() -> None:
    """The head sees as many vectors as the step has tokens, and each place gets the draw of the whole product."""
    rng, seen = np.random.default_rng(3), list[int]()
    head = jnp.asarray(rng.standard_normal((WIDTH, VOCAB)), jnp.float32)
    hidden = jnp.asarray(rng.standard_normal((ROWS, PLACES, WIDTH)), jnp.float32)
    columns = sampling_columns(ROWS, temperature=np.array([0, 1, 0, 1, 2]), key_low=np.arange(ROWS), logits_state=ROWS)
    counts, runs = np.array([2, 0, 3, 1, 0]), np.array([True, True, False, True, True])
    drafts = jnp.where(jnp.arange(PLACES - 1)[None] < counts[:, None], 7, ABSENT)
    finite = jnp.ones((ROWS, PLACES), bool).at[0, 1].set(False)

    def run(room: int) -> Draws:
        def logits(vectors: jax.Array) -> jax.Array:
            seen.append(len(vectors))
            return vectors @ head

        return draw(
            logits, hidden, jnp.arange(ROWS), drafts, Sampling.of(jnp.asarray(columns)), init_logits_state(ROWS, VOCAB),
            finite, runs=jnp.asarray(runs), room=room, vocab=VOCAB, devices=1, hooks=HOOKS["logprobs"],
            deterministic=False,
        )  # fmt: skip

    live = (np.arange(PLACES)[None] <= counts[:, None]) & runs[:, None]
    some, whole = run(int(live.sum())), run(ROWS * PLACES)
    assert seen == [live.sum(), ROWS * PLACES]
    assert some.tokens[0, 1] == NOT_FINITE
    assert not np.asarray(some.tokens)[~live].any()
    np.testing.assert_array_equal(np.asarray(some.tokens)[live], np.asarray(whole.tokens)[live])
    for own, all_places in zip(some.beside["logprobs"], whole.beside["logprobs"], strict=True):
        if own is not None:
            np.testing.assert_allclose(np.asarray(own)[live.ravel()], np.asarray(all_places)[live.ravel()], atol=1e-5)


def test_penalties_count_the_drafts_before_each_place() -> None:
    """As if the drafts were part of the text; another row's do not count, nor do absent ones."""
    rng = np.random.default_rng(1)
    head = jnp.asarray(rng.standard_normal((WIDTH, VOCAB)), jnp.float32).at[:, :4].multiply(3.0)
    hidden = jnp.asarray(rng.standard_normal((ROWS, PLACES, WIDTH)), jnp.float32)
    drafts = jnp.asarray(rng.integers(0, 4, (ROWS, PLACES - 1)), jnp.int32).at[2, 1:].set(ABSENT)
    columns = sampling_columns(
        ROWS,
        repetition=1.5,
        presence=0.3,
        frequency=50.0,
        temperature=np.array([0, 0, 0, 1, 1]),
        logits_state=np.arange(ROWS),
    )
    logits_state = count_tokens(
        init_logits_state(ROWS, VOCAB), jnp.arange(ROWS), jnp.arange(ROWS), jnp.ones(ROWS, bool)
    )

    def run(hidden: jax.Array, first: jax.Array, drafts: jax.Array, logits_state: LogitsState) -> jax.Array:
        finite, sampling = jnp.ones(hidden.shape[:2], bool), Sampling.of(jnp.asarray(columns))
        return draw(
            lambda x: x @ head, hidden, first, drafts, sampling, logits_state, finite,
            runs=jnp.ones(len(drafts), bool), room=finite.size, vocab=VOCAB, devices=1, hooks=None,
            deterministic=False,
        ).tokens  # fmt: skip

    first = jnp.zeros(ROWS, jnp.int32)
    whole, changed = run(hidden, first, drafts, logits_state), 0
    for place in range(PLACES):
        alone = run(hidden[:, place : place + 1], first + place, drafts[:, :0], logits_state)
        changed += int((alone[:, 0] != whole[:, place]).sum())
        for row in range(ROWS):
            own = drafts[row, :place]
            counted = count_tokens(logits_state, jnp.maximum(own, 0), jnp.full(place, row), own >= 0)
            alone = run(hidden[:, place : place + 1], first + place, drafts[:, :0], counted)
            if place <= int(proposed(drafts)[row]):
                assert alone[row, 0] == whole[row, place]
    assert changed, "no draft has made a difference"


def test_a_drafter_with_the_targets_logits_draws_its_tokens() -> None:
    """With the same noise, at any temperature; also from a part of the vocabulary, or a part for each row."""
    rng = np.random.default_rng(2)
    logits = jnp.asarray(2 * rng.standard_normal((ROWS, VOCAB)), jnp.float32)
    columns = sampling_columns(
        ROWS, temperature=np.array([0, 0.1, 0.7, 1, 3]), key_low=np.arange(ROWS), logits_state=ROWS
    )
    sampling, at = Sampling.of(jnp.asarray(columns)), jnp.arange(ROWS, dtype=jnp.int32) + 7
    tokens = sample(logits, at, sampling, init_logits_state(ROWS, VOCAB))
    assert draw_alike(logits, at, sampling, VOCAB).tolist() == tokens.tolist() != logits.argmax(axis=1).tolist()
    some = jnp.unique(jnp.concatenate([tokens, jnp.arange(0, VOCAB, 3)]))
    assert draw_alike(logits[:, some], at, sampling, VOCAB, ids=some).tolist() == tokens.tolist()
    turned = jnp.stack([jnp.roll(some, row) for row in range(ROWS)])
    own = jnp.take_along_axis(logits, turned, axis=1)
    assert draw_alike(own, at, sampling, VOCAB, ids=turned).tolist() == tokens.tolist()


@given(st.lists(st.integers(0, 7), min_size=1, max_size=9), st.integers(0, 60))
def test_rows_share_the_tokens_that_there_are(wanted: list[int], room: int) -> None:
    """No row gets more than it wants, nor two fewer than another unless it wants no more; all room is used."""
    got = np.asarray(shares(jnp.array(wanted, jnp.int32), jnp.int32(room), 7))
    assert (got <= wanted).all()
    assert (got >= 0).all()
    assert got.sum() == min(room, sum(wanted))
    short = got < wanted
    assert not short.any() or got.max() - got[short].min() <= 1
