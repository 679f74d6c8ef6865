"""Sampling inside the step: limits, draws, and independence of the other rows of the batch."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Bool, Float, Int

from jswa.exec.programs.logits_state import init_logits_state
from jswa.exec.programs.sampling import xla as sampling
from jswa.exec.programs.sampling.rows import Sampling
from jswa.plan import NOT_FINITE
from jswa.ribs.logprobs import traced as logprobs
from tests.support import oracles
from tests.support.builders import NO_LOGITS_STATE, sampling_columns

VOCAB, ROWS, MANY = 37, 8, 512
_keep = jax.jit(lambda scaled, columns: sampling.within_limits(scaled, Sampling.of(columns)))
FORBIDDEN = 7  # the token that rows with constraints may not draw
_LOGITS_STATE = init_logits_state(2, VOCAB)
_LOGITS_STATE["mask"] = _LOGITS_STATE["mask"].at[0, 0].set(~(1 << FORBIDDEN))


def run(
    logits: Float[np.ndarray, "R V"],
    *,
    temperature: float | list[float] = 1.0,
    top_k: int | list[int] = 0,
    top_p: float | list[float] = 1.0,
    min_p: float | list[float] = 0.0,
    positions: int | Int[np.ndarray, " R"] = 5,
    seeds: int | Int[np.ndarray, " R"] = 0,
    logits_state: int | list[int] = NO_LOGITS_STATE,
) -> list[int]:
    """Sample a token for each row; a single value of a parameter applies to all rows."""
    rows, limits = len(logits), {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    columns = sampling_columns(rows, temperature=temperature, key_low=seeds, logits_state=logits_state, **limits)
    tokens = oracles.sampled(logits, np.broadcast_to(positions, rows).astype(np.int32), columns, _LOGITS_STATE)
    out: list[int] = np.asarray(tokens).tolist()
    return out


def make_logits(kind: str, rng: np.random.Generator) -> Float[np.ndarray, " V"]:
    """Return a row of logits of a certain kind."""
    noise = rng.standard_normal(VOCAB)
    shapes = {
        "wide": 3 * noise,
        "flat": np.zeros(VOCAB),
        "ties": rng.integers(-2, 3, VOCAB),
        "peaked": np.where(np.arange(VOCAB) == rng.integers(VOCAB), 30.0, noise),
        "two": np.where(rng.permutation(VOCAB) < 2, 20.0, -20.0),
        "huge": 1e30 * noise,
        "far below zero": noise - 5e4,
    }
    return shapes[kind].astype(np.float32)


def scale(logits: Float[np.ndarray, "R V"], temperature: Float[np.ndarray, " R"]) -> Float[np.ndarray, "R V"]:
    """Return logits after temperature, in float32, shifted so that the largest is 0."""
    return np.asarray((logits - logits.max(axis=-1, keepdims=True)) / temperature[:, None])


KINDS = ("wide", "flat", "ties", "peaked", "two", "huge", "far below zero")
TEMPERATURES = (1e-4, 0.1, 0.7, 1.0, 3.0, 100.0)
TOP_KS = (0, 0, 1, 2, 5, VOCAB - 1, VOCAB, VOCAB + 1, 2**31 - 1)
TOP_PS = (1e-30, 1e-6, 0.1, 0.25, 0.5, 0.9, 0.95, 0.999, 1.0 - 2**-24, 1.0, 1.0)


@dataclass(frozen=True)
class Batch:
    """Random rows."""

    logits: Float[np.ndarray, "R V"]
    temperature: Float[np.ndarray, " R"]
    top_k: Int[np.ndarray, " R"]
    top_p: Float[np.ndarray, " R"]

    @staticmethod
    def make(seed: int) -> "Batch":
        """Return logits of any kind with parameters of any size."""
        rng = np.random.default_rng(seed)
        return Batch(
            np.stack([make_logits(kind, rng) for kind in rng.choice(KINDS, ROWS)]),
            rng.choice(TEMPERATURES, ROWS).astype(np.float32),
            rng.choice(TOP_KS, ROWS).astype(np.int32),
            np.where(rng.random(ROWS) < 0.5, rng.choice(TOP_PS, ROWS), rng.random(ROWS) + 1e-3).astype(np.float32),
        )

    @property
    def scaled(self) -> Float[np.ndarray, "R V"]:
        """Return the logits of all rows after temperature."""
        return scale(self.logits, self.temperature)

    def kept(self, row: int, slack: float) -> Bool[np.ndarray, " V"]:
        """Return the tokens of a row that the limits leave, with top_p changed by `slack`."""
        wanted = float(self.top_p[row])
        wanted = min(wanted + slack, 1.0) if wanted < 1 else wanted
        return oracles.kept_tokens(self.scaled[row], int(self.top_k[row]), wanted)


@given(st.integers(0, 2**32 - 1))
def test_the_limits_leave_the_nucleus_of_the_top_k(seed: int) -> None:
    """Bisection over float bits agrees with sorting in float64, except for sums within a rounding of top_p."""
    batch = Batch.make(seed)
    kept: Bool[np.ndarray, "R V"] = np.asarray(
        _keep(batch.scaled, sampling_columns(ROWS, top_k=batch.top_k, top_p=batch.top_p))
    )
    for row in range(ROWS):
        assert (kept[row] >= batch.kept(row, -1e-6)).all(), f"row {row} lacks a token"
        assert (kept[row] <= batch.kept(row, 1e-6)).all(), f"row {row} keeps a token too many"
        assert kept[row, batch.logits[row].argmax()]


@given(st.integers(0, 2**32 - 1))
def test_draws_respect_the_limits(seed: int) -> None:
    """Through `sample`: temperature, then top-k, then top-p; greedy rows get the first of the largest logits."""
    batch, rng = Batch.make(seed), np.random.default_rng(seed)
    greedy = rng.random(ROWS) < 0.3
    temperature = np.where(greedy, 0.0, batch.temperature).tolist()
    seeds = rng.integers(0, 2**32, ROWS)
    tokens = run(
        batch.logits, temperature=temperature, top_k=batch.top_k.tolist(), top_p=batch.top_p.tolist(), seeds=seeds
    )
    for row, token in enumerate(tokens):
        assert token == batch.logits[row].argmax() if greedy[row] else batch.kept(row, 1e-6)[token]


def test_both_zeros_are_the_same_logit() -> None:
    """A row whose largest logit is 0 keeps -0 with it: all ties at a threshold stay."""
    scaled = np.full((ROWS, VOCAB), -1.0, np.float32)
    scaled[:, ::2] = -0.0
    scaled[:, 4] = 0.0
    for limits in ({"top_p": 0.1}, {"top_k": 1}, {"min_p": 1.0}):
        kept = np.asarray(_keep(scaled, sampling_columns(ROWS, **limits)))
        assert (kept == (scaled == 0.0)).all(), limits


@pytest.mark.parametrize("top_p", [1e-45, 1e-39, 5e-324])
def test_the_smallest_top_p_keeps_the_most_likely_token(top_p: float) -> None:
    """Even if float32 rounds it to zero."""
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[:, 11] = 2.0
    assert run(logits, top_p=top_p) == [11] * ROWS


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-40, 1e-45])
def test_the_smallest_temperature_takes_the_largest_logit(temperature: float) -> None:
    """No number overflows."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((ROWS, VOCAB)).astype(np.float32)
    assert run(logits, temperature=temperature) == logits.argmax(axis=-1).tolist()
    assert run(logits, temperature=temperature, top_p=0.5, top_k=3) == logits.argmax(axis=-1).tolist()


def test_a_draw_does_not_depend_on_the_other_rows() -> None:
    """A token depends on logits, key, position and parameters of its row, not on order, padding or batch size."""
    rng = np.random.default_rng(1)
    logits = (2 * rng.standard_normal((ROWS, VOCAB))).astype(np.float32)
    temperature, top_k, top_p = [1.0, 0.7, 2.0, 0.0] * 2, [0, 5, 0, 0, 3, 0, 9, 0], [1, 1, 0.9, 1, 0.8, 1, 0.7, 1]
    positions, seeds = np.arange(10, 10 + ROWS), np.arange(ROWS)

    def tokens_of(order: list[int], extra: int = 0) -> list[int]:
        """Return the tokens of these rows in one batch, with `extra` arbitrary rows after them."""
        pick = order + [0] * extra
        rows = logits[pick]
        rows[len(order) :] = np.nan
        return run(
            rows,
            temperature=[temperature[i] for i in pick],
            top_k=[top_k[i] for i in pick],
            top_p=[top_p[i] for i in pick],
            positions=positions[pick],
            seeds=seeds[pick],
        )[: len(order)]

    together = tokens_of(list(range(ROWS)))
    shuffled = rng.permutation(ROWS).tolist()
    assert tokens_of(shuffled) == [together[i] for i in shuffled]
    assert [tokens_of([i])[0] for i in range(ROWS)] == together
    assert tokens_of([3, 1], extra=1) == [together[3], together[1]]
    assert tokens_of([0, 5, 3]) == [together[i] for i in (0, 5, 3)], "rows without limits beside a greedy one"
    assert tokens_of([3, 7, 3]) == [together[i] for i in (3, 7, 3)], "greedy rows alone"


@pytest.mark.parametrize("several", range(5))
def test_few_rows_with_limits_draw_as_they_do_among_many(several: int) -> None:
    """Up to two of them are computed alone (`_sample` compares); which of the rows they are makes no difference."""
    rng = np.random.default_rng(several)
    logits = (2 * rng.standard_normal((ROWS, VOCAB))).astype(np.float32)
    for _ in range(10):
        limited = np.isin(np.arange(ROWS), rng.permutation(ROWS)[:several])
        expected = run(logits, top_k=[2] * ROWS, seeds=np.arange(ROWS))
        tokens = run(
            logits,
            temperature=limited.astype(float).tolist(),
            top_k=np.where(limited, 2, 0).tolist(),
            seeds=np.arange(ROWS),
        )
        greedy = logits.argmax(axis=-1)
        assert tokens == np.where(limited, expected, greedy).tolist()


def test_a_draw_depends_on_key_and_position() -> None:
    """The same key and position give the same token; another key or position gives an independent draw."""
    flat = np.zeros((MANY, VOCAB), np.float32)
    assert len(set(run(flat, positions=9, seeds=4))) == 1
    by_position = run(flat, positions=np.arange(MANY), seeds=4)
    by_key = run(flat, positions=9, seeds=np.arange(MANY))
    assert set(by_position) == set(by_key) == set(range(VOCAB))
    assert by_position != by_key
    assert run(flat, positions=np.arange(MANY), seeds=5) != by_position


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 4, 1.0), (1.0, 0, 0.75), (1.0, 5, 0.8)]
)
def test_draws_are_as_frequent_as_their_probability(temperature: float, top_k: int, top_p: float) -> None:
    """Chi-square of 16,384 draws with fixed keys; a right sampler exceeds the bound with probability 10^-9."""
    seeds = 32
    draws = seeds * MANY
    logits = np.full(VOCAB, -30.0, np.float32)
    logits[:8] = [1.5, 1.0, 0.2, 0.0, -0.4, -1.0, -2.0, -9.0]
    rows, positions = np.tile(logits, (MANY, 1)), np.arange(MANY)
    tokens: list[int] = []
    for seed in range(seeds):
        parameters = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        tokens += run(rows, positions=positions, seeds=seed, **parameters)  # type: ignore[arg-type]
    scaled = scale(logits[None], np.array([temperature], np.float32))[0]
    kept = oracles.kept_tokens(scaled, top_k, top_p)
    weight = np.where(kept, np.exp(scaled.astype(np.float64)), 0.0)
    expected = draws * weight / weight.sum()
    found = np.bincount(tokens, minlength=len(logits))
    assert found[~kept].sum() == 0
    common = expected > 5
    chi_square = float(((found - expected)[common] ** 2 / expected[common]).sum())
    assert chi_square < 60, f"found {found}, expected {expected.round()}"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("constrained", [(), (3,), (2, 4), (1, 3, 5)])
def test_a_row_that_is_not_finite_fails_alone(bad: float, temperature: float, constrained: tuple[int, ...]) -> None:
    """A row with NaN or infinity gets NOT_FINITE, be it where a constraint forbids; the others get their tokens."""
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((ROWS, VOCAB)).astype(np.float32)
    logits_state = [0 if row in constrained else NO_LOGITS_STATE for row in range(ROWS)]
    parameters = partial(run, temperature=temperature, top_p=0.9, seeds=np.arange(ROWS), logits_state=logits_state)
    good = parameters(logits)
    logits[3, FORBIDDEN] = bad
    assert parameters(logits) == [*good[:3], NOT_FINITE, *good[4:]]


def test_temperature_zero_ignores_top_k_and_top_p() -> None:
    """The token is the first of the largest logits, whatever the limits."""
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[0, [4, 9]] = 3.0
    greedy = [4] + [0] * (ROWS - 1)
    assert run(logits, temperature=0.0, top_k=2, top_p=0.1) == greedy
    assert run(logits, temperature=[0.0] * 4 + [1.0] * 4, top_k=2, top_p=0.1)[:4] == greedy[:4]
    assert run(logits, temperature=0.0) == greedy


def test_the_probability_of_a_token_is_that_of_the_distribution_that_it_was_drawn_from() -> None:
    """Behind mask, temperature and limits; that of a greedy token is 1, and a row that failed has some number."""
    logits = np.random.default_rng(4).standard_normal((5, VOCAB)).astype(np.float32)
    temperature, top_k, logits_state = (
        [0.0, 1.0, 0.5, 2.0, 1.0],
        [0, 0, 3, 0, 0],
        [NO_LOGITS_STATE, NO_LOGITS_STATE, NO_LOGITS_STATE, 0, NO_LOGITS_STATE],
    )
    columns = sampling_columns(5, temperature=temperature, top_k=top_k, logits_state=logits_state)
    order = np.argsort(-logits, axis=1)
    tokens = np.array([order[0, 0], order[1, 9], order[2, 2], order[3, 20], NOT_FINITE], np.int32)
    assert FORBIDDEN not in tokens
    scores, rows = jnp.asarray(logits), Sampling.of(jnp.asarray(columns))
    limits = sampling.limits_of(scores, jnp.full(5, 5, jnp.int32), rows, _LOGITS_STATE)
    found = logprobs.drawn(scores, jnp.asarray(tokens), *limits)
    assert found.drawn is not None
    limited = logits.astype(np.float64) / np.maximum(temperature, 1e-9)[:, None]
    limited[2, order[2, 3:]] = limited[3, FORBIDDEN] = -np.inf
    expected = [limited[row, tokens[row]] - np.log(np.exp(limited[row]).sum()) for row in range(1, 4)]
    np.testing.assert_allclose(found.drawn[:4], [0.0, *expected], atol=1e-5)
    assert np.isfinite(found.drawn[4])


@given(st.integers(0, 2**32 - 1))
def test_top_n_sigma_keeps_logits_near_the_largest_by_standard_deviations(seed: int) -> None:
    """Of the finite logits, at any temperature, together with the other limits; rows that do not ask keep all."""
    rng = np.random.default_rng(seed)
    logits = (3 * rng.standard_normal((ROWS, VOCAB))).astype(np.float32)
    logits[rng.random(logits.shape) < 0.2] = -np.inf
    sigmas = rng.choice([0.0, 0.3, 1.0, 2.5], ROWS).astype(np.float32)
    top_k = rng.choice([0, 0, 3], ROWS).astype(np.int32)
    scaled = scale(logits, rng.choice([0.1, 1.0, 3.0], ROWS).astype(np.float32))
    kept = np.asarray(_keep(scaled, sampling_columns(ROWS, top_n_sigma=sigmas, top_k=top_k)))
    for row, line in enumerate(logits.astype(np.float64)):
        there = np.isfinite(line)
        beyond = (line.max() - line) / line[there].std() - (sigmas[row] or 1e9)
        expected = np.zeros(VOCAB, bool)
        expected[np.argsort(-line)[: top_k[row] or VOCAB]] = True
        sure = there & (np.abs(beyond) > 1e-4)  # float32 may round the others to either side
        assert kept[row, sure].tolist() == (expected & (beyond < 0))[sure].tolist()
        assert kept[row, line.argmax()]
