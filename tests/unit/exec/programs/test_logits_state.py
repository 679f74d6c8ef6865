"""Penalties, biases, masks and log probabilities on the device, against NumPy in float64."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Bool, Float, Int

from jswa.exec.programs.logits_state import (
    IN_PROMPT,
    ITEMS,
    MOST,
    LogitsState,
    banned_tokens,
    bit_lines,
    count_tokens,
    init_logits_state,
    logits_state_batches,
    mask_batches,
    masks_of,
    note_recent,
    set_bits,
    set_logits_state,
    set_masks,
)
from jswa.exec.programs.sampling import xla as sampling
from jswa.exec.programs.sampling.rows import Sampling
from jswa.plan import BAN_TOKENS, EVERY_TOKEN, AllWords, LogitsEntry, Mask, RowMask, Words
from jswa.ribs.logprobs.traced import logprob_rows
from jswa.sched.constraint import banned_at, make_constraint
from jswa.types import MAX_LOGPROBS, SamplingParams
from tests.support import oracles
from tests.support.builders import NO_LOGITS_STATE, sampling_columns, share

VOCAB, ROWS, TABLE = 37, 8, 4  # 37 tokens: the second word of a mask is not full; 4 rows have logits state
WORDS = -(-VOCAB // 32)

_NONE = np.zeros(0, np.int32)

_note, _banned = jax.jit(note_recent), jax.jit(banned_tokens)
_count, _set_logits_state, _set_bits = jax.jit(count_tokens), jax.jit(set_logits_state), jax.jit(set_bits)


@jax.jit
def _constrain(logits: Any, columns: Any, logits_state: Any) -> Any:
    rows = Sampling.of(columns)
    return sampling.apply_constraints(logits, jnp.zeros(ROWS, jnp.int32), rows, logits_state, rows.logits_state < TABLE)


_keep = jax.jit(lambda scaled, columns: sampling.within_limits(scaled, Sampling.of(columns)))


def words_of(allowed: Bool[np.ndarray, " V"]) -> Int[np.ndarray, " words"]:
    """Return a mask: bit t % 32 of word t // 32 for each token t."""
    words = [0] * WORDS
    for token in np.flatnonzero(allowed).tolist():
        words[token // 32] |= 1 << (token % 32)
    return np.array(words, np.uint32).view(np.int32)


def entry_of(row_id: int, **given: Any) -> LogitsEntry:
    """Return a row that begins, plain but for what is given."""
    plain = {"bias_ids": _NONE, "bias": _NONE.view(np.float32), "allowed": EVERY_TOKEN, "prompt": _NONE}
    return LogitsEntry(**{"row_id": row_id, "generated": _NONE, **plain, **given})


def set_rows(logits_state: LogitsState, entries: list[LogitsEntry], masks: list[RowMask]) -> LogitsState:
    """Set rows as a step does."""
    rows, vocab = logits_state["seen"].shape
    for line in bit_lines(entries, vocab):
        logits_state = _set_bits(logits_state, line)
    for batch in logits_state_batches(entries, masks, rows):
        logits_state = _set_logits_state(logits_state, batch)
    return logits_state


def choice_of(values: Any, rng: np.random.Generator) -> Float[np.ndarray, " R"]:
    """Draw one of the values for each row, in float32."""
    return np.asarray(rng.choice(values, ROWS), np.float32)


@dataclass(frozen=True)
class Batch:
    """Random rows, most of them with logits state, and tables that are filled token by token."""

    logits: Float[np.ndarray, "R V"]
    table_id: Int[np.ndarray, " R"]
    temperature: Float[np.ndarray, " R"]
    repetition: Float[np.ndarray, " R"]
    presence: Float[np.ndarray, " R"]
    frequency: Float[np.ndarray, " R"]
    bias: Float[np.ndarray, "E V"]
    allowed: Bool[np.ndarray, "E V"]
    prompts: list[list[int]]
    texts: list[list[int]]
    skipped: list[int]  # tokens of prompt and generated text whose KV is cached

    @staticmethod
    def make(seed: int) -> "Batch":
        """Return a random batch: prompts and texts share some tokens, and every mask allows at least one token."""
        rng = np.random.default_rng(seed)
        allowed = rng.random((TABLE, VOCAB)) < rng.choice([0.1, 0.5, 0.97], (TABLE, 1))
        allowed[np.arange(TABLE), rng.integers(0, VOCAB, TABLE)] = True
        table_id = np.full(ROWS, NO_LOGITS_STATE)
        table_id[rng.permutation(ROWS)[:TABLE]] = rng.permutation(TABLE)
        return Batch(
            logits=(3 * rng.standard_normal((ROWS, VOCAB))).astype(np.float32),
            table_id=table_id,
            temperature=choice_of([0.0, 0.5, 1.0, 2.0], rng),
            repetition=choice_of([0.5, 1.0, 1.3, 4.0], rng),
            presence=choice_of([-2.0, 0.0, 0.7, 2.0], rng),
            frequency=choice_of([-1.0, 0.0, 0.3, 2.0], rng),
            bias=np.where(rng.random((TABLE, VOCAB)) < 0.2, rng.uniform(-9, 9, (TABLE, VOCAB)), 0).astype(np.float32),
            allowed=allowed,
            prompts=[rng.integers(0, VOCAB, rng.integers(1, 12)).tolist() for _ in range(TABLE)],
            texts=[rng.integers(0, VOCAB // 2, rng.integers(0, 12)).tolist() for _ in range(TABLE)],
            skipped=rng.integers(0, 24, TABLE).tolist(),
        )

    def columns(self, **more: Any) -> Int[np.ndarray, "R C"]:
        """Return the packed parameters."""
        values = {name: getattr(self, name) for name in ("temperature", "repetition", "presence", "frequency")}
        return sampling_columns(ROWS, logits_state=self.table_id, **values, **more)

    def logits_state(self) -> LogitsState:
        """Return the tables of these rows."""
        logits_state = init_logits_state(TABLE, VOCAB, drafts=2)
        parts, entries, masks = [], [], []
        for i in range(TABLE):
            words = words_of(self.allowed[i])
            listed = np.arange(WORDS, dtype=np.int32)
            first = [Mask(0, None, words), Mask(0, listed, words), Mask(-1, listed[1:], words[1:]), EVERY_TOKEN][i]
            changed = [listed[:0], listed[:0], listed[:1], listed][i]
            masks += [RowMask(i, Words(changed, words[changed]))] if len(changed) else []
            ids = np.flatnonzero(self.bias[i]).astype(np.int32)
            prompt, text, cut = self.prompts[i], self.texts[i], max(0, self.skipped[i] - len(self.prompts[i]))
            entries.append(
                entry_of(
                    i,
                    bias_ids=ids,
                    bias=self.bias[i][ids],
                    allowed=first,
                    prompt=np.array(prompt * (ITEMS if i == 1 else 1), np.int32),  # more than fit: sent as bits
                    generated=np.array(text[:cut], np.int32),
                )
            )
            parts += [(i, t, False) for t in prompt] + [(i, t, True) for t in text[cut:]]
        logits_state = set_rows(logits_state, entries, masks)
        parts += [(TABLE, 0, False)] * (TABLE * 24 - len(parts))  # padding, and one compiled shape
        ids, tokens, generated = (np.array(column) for column in zip(*parts, strict=True))
        filled: LogitsState = _count(logits_state, tokens.astype(np.int32), ids.astype(np.int32), generated)
        return filled

    def expected(self, row: int) -> Float[np.ndarray, " V"]:
        """Return the expected logits of a row, computed token by token."""
        table_id = int(self.table_id[row])
        out: Float[np.ndarray, " V"] = self.logits[row].astype(np.float64)
        if table_id == NO_LOGITS_STATE:
            return out
        prompt, text = self.prompts[table_id], self.texts[table_id]
        for token in range(VOCAB):
            out[token] += float(self.bias[table_id, token])
            if token in prompt or token in text:
                factor = float(self.repetition[row])
                out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
            out[token] -= float(self.frequency[row]) * text.count(token)
            out[token] -= float(self.presence[row]) * (token in text)
            if not self.allowed[table_id, token]:
                out[token] = -np.inf
        return out


@share(2)
@given(st.integers(0, 2**32 - 1))
def test_constrained_logits_match_float64_and_other_rows_are_unchanged(seed: int) -> None:
    """Bias, then repetition for prompt and text, presence and frequency for the text alone, then the mask."""
    batch = Batch.make(seed)
    found = np.asarray(_constrain(batch.logits, batch.columns(), batch.logits_state()))
    for row in range(ROWS):
        expected = batch.expected(row)
        assert ((found[row] == -np.inf) == (expected == -np.inf)).all()
        finite = np.isfinite(expected)
        np.testing.assert_allclose(found[row][finite], expected[finite], rtol=1e-5, atol=1e-5)
    plain = batch.table_id == NO_LOGITS_STATE
    assert found[plain].tobytes() == batch.logits[plain].tobytes()


@share(2)
@given(st.integers(0, 2**32 - 1))
def test_tokens_respect_their_rows_constraints_and_no_others(seed: int) -> None:
    """Greedy rows get the largest constrained logit, drawn tokens are allowed, and plain rows draw as if alone."""
    batch = Batch.make(seed)
    positions, keys = np.arange(ROWS, dtype=np.int32), np.arange(ROWS) + seed % 1000
    tokens = np.asarray(oracles.sampled(batch.logits, positions, batch.columns(key_low=keys), batch.logits_state()))
    plain_columns = sampling_columns(ROWS, temperature=batch.temperature, key_low=keys)
    alone = np.asarray(oracles.sampled(batch.logits, positions, plain_columns, init_logits_state(TABLE, VOCAB)))
    for row, token in enumerate(tokens.tolist()):
        expected = batch.expected(row)
        if batch.table_id[row] == NO_LOGITS_STATE:
            assert token == alone[row]
        elif batch.temperature[row] == 0:
            assert expected[token] >= expected.max() - 1e-4
        assert expected[token] > -np.inf


def kept_by_sorting(
    scaled: Float[np.ndarray, " V"], min_p: float, top_k: int, top_p: float, slack: float
) -> Bool[np.ndarray, " V"]:
    """Return the tokens that min_p, then top-k, then top-p leave, with min_p and top_p changed by `slack`."""
    share = np.exp(scaled.astype(np.float64) - scaled.max())
    first: Bool[np.ndarray, " V"] = share >= min(min_p * (1 - slack), 1.0)
    left = np.where(first, scaled, -np.inf).astype(np.float32)
    wanted = min(top_p + slack, 1.0) if top_p < 1 else top_p
    return np.asarray(first & oracles.kept_tokens(left, top_k, wanted))


@share(2)
@given(st.integers(0, 2**32 - 1))
def test_min_p_keeps_tokens_near_the_most_likely_one_before_top_k_and_top_p(seed: int) -> None:
    """p ≥ min_p · p_max after temperature; bisection agrees with sorting except for roundings at the thresholds."""
    rng = np.random.default_rng(seed)
    logits = (3 * rng.standard_normal((ROWS, VOCAB))).astype(np.float32)
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / choice_of([0.3, 1.0, 3.0], rng)[:, None]
    min_p, top_p = choice_of([0.0, 1e-6, 0.02, 0.1, 0.5, 1.0], rng), choice_of([0.3, 0.8, 0.95, 1.0, 1.0], rng)
    top_k = rng.choice([0, 0, 1, 4, 20], ROWS).astype(np.int32)
    kept = np.asarray(_keep(scaled, sampling_columns(ROWS, min_p=min_p, top_k=top_k, top_p=top_p)))
    for row in range(ROWS):
        limits = float(min_p[row]), int(top_k[row]), float(top_p[row])
        low, high = (kept_by_sorting(scaled[row], *limits, slack) for slack in (-1e-5, 1e-5))
        assert (kept[row] >= low).all(), f"row {row} lacks a token"
        assert (kept[row] <= high).all(), f"row {row} keeps a token too many"
        assert kept[row, logits[row].argmax()]


@pytest.mark.parametrize("min_p", [0.3, 1.0])
def test_draws_stay_within_min_p_after_temperature(min_p: float) -> None:
    """Through `sample`: exactly the tokens that are likely enough are drawn."""
    logits = np.zeros((64, VOCAB), np.float32) - 20
    logits[:, 30:34] = [2.0, 2.0, 1.0, -2.0]  # after temperature 2: shares 1, 1, 0.61, 0.14
    columns = sampling_columns(64, temperature=2.0, min_p=min_p, key_low=7)
    tokens = oracles.sampled(logits, np.arange(64, dtype=np.int32), columns, init_logits_state(TABLE, VOCAB))
    assert set(np.asarray(tokens).tolist()) == ({30, 31, 32} if min_p < 1 else {30, 31})


def test_counts_ignore_padding_and_tokens_of_the_prompt() -> None:
    """Row ids past the end are dropped; tokens of the prompt do not count; repetitions in one step add up."""
    logits_state = init_logits_state(2, VOCAB)
    row_ids = np.array([0, 0, 0, 1, 1, 1, 2, 2, NO_LOGITS_STATE], np.int32)
    tokens = np.array([3, 3, 5, 3, 36, 36, 7, 8, 9], np.int32)
    generated = np.array([False, False, True, False, True, True, True, False, True])
    logits_state = _count(_count(logits_state, tokens, row_ids, generated), tokens, row_ids, generated)
    counts = np.zeros((2, VOCAB), int)
    counts[0, 5], counts[1, 36] = 2, 4
    assert (np.asarray(logits_state["seen"]) == counts).all()


def test_counts_stop_before_they_overflow_into_the_mark_of_the_prompt() -> None:
    """Also if all tokens of a large step are the same; the mark stays, and other tokens count on."""
    logits_state = set_rows(init_logits_state(1, VOCAB), [entry_of(0, prompt=np.array([3], np.int32))], [])
    tokens, row = np.full(10_000, 3, np.int32), np.zeros(10_000, np.int32)
    for _ in range(5):
        logits_state = _count(logits_state, tokens, row, np.ones(10_000, bool))
    logits_state = _count(logits_state, tokens + 1, row, np.ones(10_000, bool))
    seen = np.asarray(logits_state["seen"])[0]
    assert MOST - 10_000 < seen[3] - IN_PROMPT <= MOST
    assert (seen[4], seen.max()) == (10_000, seen[3])


def test_a_new_row_starts_without_counts_and_a_new_mask_keeps_them() -> None:
    """Beginning a row resets its counts, bias and mask; a new mask changes nothing else; other rows stay."""
    before = Batch.make(0).logits_state()
    prompt, at = np.array([2, 0, 32, 2], np.int32), np.array([0, 1], np.int32)
    masks = [
        RowMask(2, Words(at, np.array([9, 2], np.int32))),
        RowMask(3, Words(at, np.array([-2, ~(1 << 4)], np.int32))),
    ]
    allowed = Mask(0, at[1:], np.array([7], np.int32))
    entries = [entry_of(1, prompt=prompt), entry_of(3, allowed=allowed)]
    after = {name: np.asarray(table) for name, table in set_rows(before, entries, masks).items()}
    assert (after["seen"][1] == np.isin(np.arange(VOCAB), prompt) * IN_PROMPT).all()
    assert not after["seen"][3].any()
    assert (after["bias_ids"][[1, 3]] == VOCAB).all()
    assert (after["mask"][1] == -1).all()
    assert after["mask"][2].tolist() == [9, 2]
    assert after["mask"][3].tolist() == [-2, ~(1 << 4)], "a change counts, not what the row begins with"
    changed: dict[str, list[int]] = {"seen": [1, 3], "bias_ids": [1, 3], "mask": [1, 2, 3]}
    for name, table in before.items():
        own = changed.get(name, [])
        assert (np.delete(after[name], own, 0) == np.delete(np.asarray(table), own, 0)).all()


@pytest.mark.parametrize("order", [1, -1])
def test_items_that_do_not_fit_one_launch_come_after_the_beginning_of_their_row(order: int) -> None:
    """Twenty rows that begin, the last or the first with more skipped tokens than a launch has items."""
    rows = 20
    many = np.arange(2 * ITEMS + 5, dtype=np.int32) % 30
    ids = np.arange(10, dtype=np.int32)
    entries = [
        entry_of(
            i, bias_ids=ids, bias=ids.astype(np.float32), prompt=ids + i, generated=many if i == rows - 1 else _NONE
        )
        for i in range(rows)
    ]
    dirty: LogitsState = jax.tree.map(lambda table: jnp.full_like(table, 3), init_logits_state(rows, 64))
    logits_state = set_rows(dirty, entries[::order], [])
    seen = np.zeros((rows, 64), int)
    for i in range(rows):
        seen[i, ids + i] = IN_PROMPT
    np.add.at(seen[-1], many, 1)
    assert (np.asarray(logits_state["seen"]) == seen).all()
    assert (np.asarray(logits_state["bias_ids"])[:, :11] == [*ids.tolist(), 64]).all()
    assert (np.asarray(logits_state["mask"]) == -1).all()


@given(st.data())
def test_the_last_token_of_a_bad_word_is_banned_behind_the_others(data: st.DataObject) -> None:
    """And stop tokens before min_tokens, in steps that run any number of tokens, behind any cached part of the text."""
    ids = st.integers(0, 2)
    prompt, text = data.draw(st.lists(ids, min_size=1, max_size=20)), data.draw(st.lists(ids, min_size=1, max_size=40))
    words = tuple(data.draw(st.lists(st.lists(ids, min_size=2, max_size=BAN_TOKENS).map(tuple), max_size=5)))
    params = SamplingParams(min_tokens=data.draw(st.integers(0, 5)), presence_penalty=1.0)
    constraint = make_constraint(params, VOCAB, len(prompt), frozenset({1, 30}), words)
    assert constraint is not None
    assert constraint.fits_device
    whole, cached = np.array(prompt + text, np.int32), data.draw(st.integers(0, len(prompt + text) - 1))
    recent, bans = whole[:cached][-BAN_TOKENS:], constraint.bans()
    dirty: LogitsState = jax.tree.map(lambda table: jnp.full_like(table, 2), init_logits_state(2, VOCAB))
    logits_state = set_rows(dirty, [entry_of(1, bans=bans, recent=recent, start=cached)], [])
    while cached < len(whole):
        end = min(len(whole), cached + data.draw(st.sampled_from([1, 1, 2, 8, 32])))
        drafts = data.draw(st.integers(0, 7))  # wrong ones, which the next step overwrites
        tokens = np.resize(whole[cached:end], 40).astype(np.int32)
        real, positions = np.arange(40) < end + drafts - cached, cached + np.arange(40)
        ends = np.full(40, end + drafts)
        logits_state = _note(logits_state, tokens, np.where(real, 1, TABLE), positions, ends)
        if end > len(prompt):
            length = end - len(prompt)
            found = _banned(logits_state, np.array([1]), np.array([end]), np.array([len(prompt)]))[0].tolist()
            early = {1, 30} if length < params.min_tokens else set()
            assert {token for token in found if token < VOCAB} == banned_at(
                constraint, whole[-len(text) :][:length]
            ) | early
        cached = end


def test_rows_that_begin_in_one_step_share_a_launch_of_few_bytes() -> None:
    """Eight rows with a prompt of 50 tokens, 10 biases and a mask of 20 words; a long prompt is sent as bits."""
    ids = np.arange(50, dtype=np.int32)
    allowed = Mask(0, ids[:20], ids[:20])
    entries = [
        entry_of(i, bias_ids=ids[:10], bias=ids[:10].astype(np.float32), allowed=allowed, prompt=ids) for i in range(8)
    ]
    (batch,) = logits_state_batches(entries, [], 256)
    assert batch.nbytes / 8 < 2_000
    assert not list(bit_lines(entries, 262_144))
    (line,) = bit_lines([entry_of(3, prompt=np.arange(100_000, dtype=np.int32))], 262_144)
    assert line.nbytes == 262_144 // 8 + 8


@pytest.mark.parametrize("vocab", [VOCAB, MAX_LOGPROBS - 3])
def test_logprobs_are_the_log_softmax_with_rank_and_most_likely_tokens(vocab: int) -> None:
    """A rank counts the more likely tokens, so ties have equal ranks; a small vocabulary is listed completely."""
    rng = np.random.default_rng(5)
    logits = (2 * rng.standard_normal((ROWS, vocab))).astype(np.float32)
    logits[0, :5] = 9.0
    chosen = rng.integers(0, vocab, ROWS).astype(np.int32)
    chosen[0] = 3
    found = logprob_rows(jnp.asarray(logits), jnp.asarray(chosen))
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    own = expected[np.arange(ROWS), chosen]
    order = np.argsort(-wide, axis=-1, kind="stable")[:, :MAX_LOGPROBS]
    np.testing.assert_allclose(np.asarray(found.chosen), own, atol=1e-5)
    np.testing.assert_allclose(np.asarray(found.values), np.take_along_axis(expected, order, 1), atol=1e-5)
    assert (np.asarray(found.rank) == (wide > wide[np.arange(ROWS), chosen][:, None]).sum(axis=-1) + 1).all()
    assert (np.asarray(found.ids) == order).all()
    assert np.asarray(found.rank)[0] == 1


def test_masks_of_rows_with_drafts_are_chosen_by_their_number() -> None:
    """Of a row whose masks come by place; any other row has one mask."""
    rng = np.random.default_rng(7)
    words = rng.integers(-(2**31), 2**31, (3, 4, WORDS)).astype(np.int32)
    masks = [RowMask(row, AllWords(words[row, place]), place) for row in range(3) for place in range(4)]
    logits_state = init_logits_state(TABLE, VOCAB, 3)
    for batch in mask_batches([mask for mask in masks if mask.row_id != 1 or not mask.place], TABLE):
        logits_state = set_masks(logits_state, jnp.asarray(batch))
    row_ids, by_place = jnp.array([0, 1, 2, 2, 2]), jnp.array([1, 0, 1, 1, 0])
    drafts = jnp.array([[4, 5, 6], [4, 5, -1], [-1, -1, -1], [4, -1, -1], [4, 5, 6]])
    found = np.asarray(masks_of(logits_state, row_ids, by_place, drafts))
    np.testing.assert_array_equal(found, words[[0, 1, 2, 2, 2], [3, 0, 0, 1, 0]])
    np.testing.assert_array_equal(
        np.asarray(masks_of(logits_state, row_ids, by_place, None)), words[np.asarray(row_ids), 0]
    )
