"""Sampling inside the step on XLA: penalties and constraints, then greedy or temperature with limits.

There is no sort: the k-th largest logit, and the logit that completes the nucleus, are found digit by digit in the
ordered bit patterns of float32, in passes of compare and sum. A step whose rows are all greedy, or use no limit, skips
this. A row's draw depends on its key, its position and its logits alone. This runs on CPUs, and where several devices
share the vocabulary; `kernels` makes the same draws on one GPU.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt

from jswa.exec.programs.logits_state import LogitsState, allowed_tokens, banned_tokens, masks_of, seen_tokens
from jswa.exec.programs.sampling.rows import Sampling
from jswa.model.collectives import (
    argmax_columns,
    pmax,
    psum,
    shard_columns,
    shard_start,
    true_on_all,
    true_on_any,
)
from jswa.plan import NOT_FINITE, NOTHING_ALLOWED
from pallas_kernels.elementwise.sums import Implementation as Sums
from pallas_kernels.elementwise.sums import apart, row_sums, softmax, sums_from

_TINY = 2.0**-126  # smallest normal float32
_NEAR = 1 + 2.0**-20  # a kernel may round the distance of the last token that it keeps otherwise


def sample(
    logits: Float[Array, "R V"],
    positions: Int[Array, " R"],
    rows: Sampling,
    state: LogitsState,
    devices: int = 1,
    finite: Bool[Array, " R"] | bool = True,
    few: int = 0,
    drafts: Int[Array, "R K"] | None = None,
    sums: Sums = "xla",
) -> Int[Array, " R"]:
    """Sample a token per row; NOT_FINITE if it is not `finite`, NOTHING_ALLOWED if its constraint forbids every token.

    Args:
        logits: of this device's share of the vocabulary; all devices return the same tokens.
        positions: of the token to be sampled; folded into the row's key (threefry).
        rows: temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and top_n_sigma 0 are off. min_p and top-n-sigma come
            first, then top-k, then top-p of what is left.
        finite: whether what this device has computed for the row besides its logits is finite.
        few: the number of rows with constraints, limits or temperatures for which the others pay no more than a copy
            of their logits (`few_rows`); 0: all rows pay for any, and a row's numbers do not depend on how many do.
        sums: the implementation of sums along rows where XLA draws.
        drafts: what each row has drafted before the token; penalties count it (`seen_tokens`).
    """
    constrained, given = rows.logits_state < len(state["seen"]), logits

    def constrain(take: _Take) -> tuple[Float[Array, "n V"], Bool[Array, " n"]]:
        # What is forbidden is -inf, so that only here it can be told whether the model's own logits are finite. If they
        # were read behind the conditional too, XLA would copy them in every step.
        own = take(given)
        allowed = apply_constraints(own, take(positions), take(rows), state, take(constrained), devices, take(drafts))
        return allowed, jnp.isfinite(own).all(axis=-1)

    logits, own = _for_rows(constrained, (given, jnp.ones(len(given), bool)), constrain, few)
    finite &= own
    finite = true_on_all(finite & (constrained | jnp.isfinite(logits).all(axis=-1)), devices)
    greedy = argmax_columns(logits, devices)
    random = rows.temperature > 0
    drawn = lax.cond(
        random.any(), lambda: _draw(logits, greedy, positions, rows, random, devices, few, sums), lambda: greedy
    )
    possible = true_on_any((logits > -jnp.inf).any(axis=-1), devices)
    failed = jnp.where(finite, NOTHING_ALLOWED, NOT_FINITE)
    return jnp.where(finite & possible, drawn, failed)


def limits_of(
    logits: Float[Array, "R V"],
    positions: Int[Array, " R"],
    rows: Sampling,
    state: LogitsState,
    devices: int = 1,
    drafts: Int[Array, "R K"] | None = None,
    sums: Sums = "xla",
    reach: Float[Array, " R"] | None = None,
) -> tuple[Bool[Array, " R"], Callable[[], Float[Array, "R V"]]]:
    """Return which rows `sample` draws at random, and a function that returns the logits from which it draws them.

    `reach`: how far from the largest the limits keep logits by temperature, if kernels have drawn (`arguments.Drawn`).
    """
    random, constrained = rows.temperature > 0, rows.logits_state < len(state["seen"])

    def limited() -> Float[Array, "R V"]:
        changed = _for_rows(
            constrained,
            logits,
            lambda take: apply_constraints(logits, positions, rows, state, constrained, devices, drafts),
            0,
        )
        if reach is None:
            return _kept(changed, rows, random, devices, 0, sums)
        scaled = _scaled(changed, rows, random, devices)
        return jnp.where(scaled >= -reach[:, None] * _NEAR, scaled, -jnp.inf)

    return random, limited


def apply_constraints(
    logits: Float[Array, "R V"],
    positions: Int[Array, " R"],
    rows: Sampling,
    state: LogitsState,
    constrained: Bool[Array, " R"],
    devices: int = 1,
    drafts: Int[Array, "R K"] | None = None,
) -> Float[Array, "R V"]:
    """Apply bias, then penalties (Keskar et al. 2019 for repetition), mask and bans, to the rows that have any."""
    row_ids, vocab = jnp.minimum(rows.logits_state, len(state["seen"]) - 1), logits.shape[1] * devices
    ids, bias = jnp.where(constrained[:, None], state["bias_ids"][row_ids], vocab), state["bias"][row_ids]
    biased = lax.cond((ids < vocab).any(), lambda: _add_bias(logits, ids, bias, devices), lambda: logits)
    seen, counts = seen_tokens(state, row_ids, drafts, devices)
    repetition = jnp.where(seen, rows.repetition[:, None], 1.0)
    changed = jnp.where(biased > 0, biased / repetition, biased * repetition)
    changed -= rows.frequency[:, None] * counts
    changed -= rows.presence[:, None] * (counts > 0).astype(jnp.float32)
    allowed = shard_columns(allowed_tokens(masks_of(state, row_ids, rows.by_place, drafts), vocab), devices)
    changed = jnp.where(allowed, changed, -jnp.inf)
    banned = banned_tokens(state, row_ids, positions, rows.prompt_length)
    banned = jnp.where(constrained[:, None], banned, vocab)
    out = lax.cond((banned < vocab).any(), lambda: _add_bias(changed, banned, -jnp.inf, devices), lambda: changed)
    return jnp.where(constrained[:, None], out, logits)


def _add_bias(
    logits: Float[Array, "R V"], ids: Int[Array, "R B"], bias: Float[Array, "R B"] | float, devices: int
) -> Float[Array, "R V"]:
    """Add biases to the logits of this device's share of the vocabulary; ids past the vocabulary are dropped."""
    rows, size = logits.shape
    columns = ids - shard_start(size, devices)
    columns = jnp.where(columns < 0, size, columns)  # a negative index would count from the end
    return logits.at[jnp.arange(rows)[:, None], columns].add(bias, mode="drop")


def few_rows(rows: int) -> int:
    """Return the number of rows that a step of `rows` rows computes alone, if no more of them need it."""
    return rows // 8


_Take = Callable[[Any], Any]


def _for_rows[Rows](flags: Bool[Array, " R"], values: Rows, change: Callable[[_Take], Rows], few: int) -> Rows:
    """Return `values` with the flagged rows changed. If no more than `few` are flagged, only these are computed.

    Args:
        values: arrays [R, ...].
        change: returns the changed rows, given a function that takes these rows of arrays [R, ...].
    """

    def alone() -> Rows:
        places = jnp.where(flags, jnp.cumsum(flags, dtype=jnp.int32) - 1, few)
        numbers = jnp.arange(len(flags), dtype=jnp.int32)
        chosen = jnp.full(few, len(flags), jnp.int32).at[places].set(numbers, mode="drop")
        changed = change(lambda tree: jax.tree.map(lambda array: array.at[chosen].get(mode="clip"), tree))
        put: Rows = jax.tree.map(lambda old, new: old.at[chosen].set(new, mode="drop"), values, changed)
        return put

    def together() -> Rows:
        def chosen(old: Shaped[Array, "R ..."], new: Shaped[Array, "R ..."]) -> Shaped[Array, "R ..."]:
            return jnp.where(flags.reshape(-1, *[1] * (old.ndim - 1)), new, old)

        put: Rows = jax.tree.map(chosen, values, change(lambda tree: tree))
        return put

    if not few:
        out: Rows = lax.cond(flags.any(), together, lambda: values)
        return out
    count = flags.sum(dtype=jnp.int32)
    out = lax.switch((count > 0).astype(jnp.int32) + (count > few).astype(jnp.int32), (lambda: values, alone, together))
    return out


def _draw(
    logits: Float[Array, "R V"],
    greedy: Int[Array, " R"],
    positions: Int[Array, " R"],
    rows: Sampling,
    random: Bool[Array, " R"],
    devices: int,
    few: int,
    sums: Sums,
) -> Int[Array, " R"]:
    """Gumbel-max over the kept tokens of the random rows (Gumbel 1954); the others keep the greedy token."""
    kept = _kept(logits, rows, random, devices, few, sums)

    def drawn(take: _Take) -> Int[Array, " n"]:
        whole = (kept.shape[1] * devices,)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, whole, jnp.float32))(
            row_keys(*take((rows.keys, positions)))
        )
        return argmax_columns(take(kept) + shard_columns(apart(noise, sums), devices), devices)

    return _for_rows(random, greedy, drawn, few)


def row_keys(keys: UInt[Array, "n 2"], positions: Int[Array, " n"]) -> Shaped[Array, " n"]:
    """Return the keys of the draws: a row's own, with the position folded in."""
    keyed: Shaped[Array, " n"] = jax.vmap(
        lambda key, position: jax.random.fold_in(jax.random.wrap_key_data(key), position)
    )(keys, positions)
    return keyed


def _kept(
    logits: Float[Array, "R V"], rows: Sampling, random: Bool[Array, " R"], devices: int, few: int, sums: Sums
) -> Float[Array, "R V"]:
    """Return the logits of the random rows by temperature, -inf for tokens that the limits do not keep."""
    scaled = _scaled(logits, rows, random, devices)
    limited = random & ((rows.top_k > 0) | (rows.top_p < 1.0) | (rows.min_p > 0.0) | (rows.top_n_sigma > 0.0))

    def cut(take: _Take) -> Float[Array, "n V"]:
        return jnp.where(within_limits(take(scaled), take(rows), devices, sums), take(scaled), -jnp.inf)

    return _for_rows(limited, scaled, cut, few)


def _scaled(
    logits: Float[Array, "R V"], rows: Sampling, random: Bool[Array, " R"], devices: int
) -> Float[Array, "R V"]:
    """Return logits by temperature, the largest 0: it is subtracted first, so that no low temperature overflows."""
    most = pmax(logits.max(axis=-1, keepdims=True), devices)
    return (logits - most) / jnp.where(random, rows.temperature, 1.0)[:, None]


def within_limits(
    scaled: Float[Array, "R V"], rows: Sampling, devices: int = 1, sums: Sums = "xla"
) -> Bool[Array, "R V"]:
    """Return which tokens the limits keep. All ties at a threshold stay, so the result needs no order."""
    vocab = scaled.shape[1] * devices
    # The largest is 0, so the most likely token's share is exp(0): p ≥ min_p · p_max is scaled ≥ log(min_p).
    kept = (scaled >= apart(jnp.log(rows.min_p), sums)[:, None]) | (rows.min_p == 0.0)[:, None]
    asked = rows.top_n_sigma > 0.0
    near: Bool[Array, "R V"] = lax.cond(
        asked.any(),
        lambda: (scaled >= -rows.top_n_sigma[:, None] * _deviation(scaled, devices, sums)) | ~asked[:, None],
        lambda: jnp.ones(scaled.shape, bool),
    )
    kept &= near
    ordered = _ordered_bits(jnp.where(kept, scaled, -jnp.inf))
    wanted = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab)

    def enough_left(threshold: UInt[Array, "R N"]) -> Bool[Array, "R N"]:
        return psum((ordered[:, None] >= threshold[..., None]).sum(axis=-1), devices) >= wanted[:, None]

    kth = _largest(enough_left, len(scaled))
    kept &= ordered >= kth[:, None]
    probability = _softmax(jnp.where(kept, scaled, -jnp.inf), devices, sums)
    # Without top-p every token stays, also tokens whose probability rounds to 0. And a top_p that float32 (or a
    # device without subnormals) takes for zero still keeps one.
    enough = jnp.where(rows.top_p < 1.0, jnp.maximum(rows.top_p, _TINY), 0.0)

    # Keys of its own: of the search before's, XLA would compare with the first candidates once for both searches, and
    # write what it finds, 15 bytes for each logit.
    left = jnp.where(kept, ordered, jnp.uint32(0))

    def complete(threshold: UInt[Array, "R N"]) -> Bool[Array, "R N"]:
        return psum(sums_from(probability, left, threshold, sums), devices) >= enough[:, None]

    edge = _largest(complete, len(scaled))
    return kept & ((left >= edge[:, None]) | (rows.top_p >= 1.0)[:, None])


def _deviation(scaled: Float[Array, "R V"], devices: int, sums: Sums) -> Float[Array, "R 1"]:
    """Return the standard deviation of each row's logits that are finite."""
    there = scaled > -jnp.inf
    count = psum(row_sums(there.astype(jnp.float32), sums), devices)
    mean = psum(row_sums(jnp.where(there, scaled, 0.0), sums), devices) / count
    squares = psum(row_sums(jnp.where(there, (scaled - mean) ** 2, 0.0), sums), devices)
    return jnp.sqrt(squares / count)


def _softmax(scaled: Float[Array, "R V"], devices: int, sums: Sums) -> Float[Array, "R V"]:
    """Softmax of logits that are shifted so that each row's maximum is 0."""
    if devices == 1:
        return softmax(scaled, sums)
    share = jnp.exp(scaled)
    return share / psum(share.sum(axis=-1, keepdims=True), devices)


def _ordered_bits(x: Float[Array, "R V"]) -> UInt[Array, "R V"]:
    """Return unsigned integers in the same order as the floats; both zeros are the same number."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0.0, 0.0, x).astype(jnp.float32), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest(holds: Callable[[UInt[Array, "R N"]], Bool[Array, "R N"]], rows: int) -> UInt[Array, " R"]:
    """Return per row the largest threshold that `holds`. It holds at 0, and stops holding once as thresholds grow.

    A pass finds two bits on a CPU, where more cost more than they save. On GPUs it finds four, because passes are
    unrolled: a loop cannot be part of a CUDA graph, and the host would wait for the step at its condition.
    """

    def one_pass(bits: int, number: int | Int[Array, ""], threshold: UInt[Array, " R"]) -> UInt[Array, " R"]:
        shift = jnp.asarray(32 - bits - bits * number, jnp.uint32)
        candidates = threshold[:, None] | (jnp.arange(1, 2**bits, dtype=jnp.uint32) << shift)[None]
        # The digit is the number of candidates for which it holds, as it holds for all smaller ones.
        return threshold | (holds(candidates).sum(axis=-1, dtype=jnp.uint32) << shift)

    def unrolled(threshold: UInt[Array, " R"]) -> UInt[Array, " R"]:
        for number in range(8):
            threshold = one_pass(4, number, threshold)
        return threshold

    def loop(threshold: UInt[Array, " R"]) -> UInt[Array, " R"]:
        found: UInt[Array, " R"] = lax.fori_loop(0, 16, partial(one_pass, 2), threshold)
        return found

    found: UInt[Array, " R"] = lax.platform_dependent(jnp.zeros(rows, jnp.uint32), cpu=loop, default=unrolled)
    return found
