"""Choosing tokens inside the step: greedy, temperature, top-k, top-p, by row.

No sort: the k-th largest logit, and the logit at which the nucleus is complete, are found by bisection over the
ordered bit patterns of float32, 32 passes of compare and sum. A step whose rows are all greedy, or use neither limit,
skips that work. A row's draw depends on its key, its position and its logits alone.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from jswa.types import NOT_FINITE


def sample(
    logits: Float[Array, "R V"],
    positions: Int[Array, " R"],
    *,
    temperature: Float[Array, " R"],
    top_k: Int[Array, " R"],
    top_p: Float[Array, " R"],
    keys: UInt[Array, "R 2"],
) -> Int[Array, " R"]:
    """A token per row; NOT_FINITE where the row's logits hold NaN or infinity.

    Args:
        positions: of the token to be sampled; folded into the row's key (threefry).
        temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off. Top-k comes first, top-p of what is left.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    random = temperature > 0
    drawn = lax.cond(
        random.any(), lambda: _draw(logits, positions, random, temperature, top_k, top_p, keys), lambda: greedy
    )
    finite = jnp.isfinite(logits).all(axis=-1)
    return jnp.where(finite, jnp.where(random, drawn, greedy), NOT_FINITE)


def _draw(
    logits: Float[Array, "R V"],
    positions: Int[Array, " R"],
    random: Bool[Array, " R"],
    temperature: Float[Array, " R"],
    top_k: Int[Array, " R"],
    top_p: Float[Array, " R"],
    keys: UInt[Array, "R 2"],
) -> Int[Array, " R"]:
    """Gumbel-max over the kept tokens (Gumbel 1954)."""
    # A temperature near 0 must not overflow: the largest logit becomes 0 first.
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / jnp.where(random, temperature, 1.0)[:, None]
    limited = random & ((top_k > 0) | (top_p < 1.0))
    kept = lax.cond(limited.any(), lambda: _keep(scaled, top_k, top_p), lambda: jnp.ones_like(scaled, bool))
    row_keys = jax.vmap(lambda key, position: jax.random.fold_in(jax.random.wrap_key_data(key), position))(
        keys, positions
    )
    noise = jax.vmap(lambda key: jax.random.gumbel(key, scaled.shape[1:], jnp.float32))(row_keys)
    return jnp.argmax(jnp.where(kept, scaled + noise, -jnp.inf), axis=-1).astype(jnp.int32)


def _keep(scaled: Float[Array, "R V"], top_k: Int[Array, " R"], top_p: Float[Array, " R"]) -> Bool[Array, "R V"]:
    """Which tokens top-k and then top-p leave. Ties at a threshold all stay, so the result needs no order."""
    ordered = _ordered_bits(scaled)
    wanted = jnp.where(top_k > 0, jnp.minimum(top_k, scaled.shape[1]), scaled.shape[1])
    kth = _largest(lambda t: (ordered >= t[:, None]).sum(axis=-1) >= wanted, scaled.shape[0])
    in_top_k = ordered >= kth[:, None]
    probability = jax.nn.softmax(jnp.where(in_top_k, scaled, -jnp.inf), axis=-1)
    # Without top-p every token stays, also those whose probability rounds to nothing.
    # And a top_p that float32 (or a device without subnormals) takes for zero still keeps one.
    enough = jnp.where(top_p < 1.0, jnp.maximum(top_p, 2.0**-126), 0.0)
    edge = _largest(
        lambda t: jnp.where(ordered >= t[:, None], probability, 0.0).sum(axis=-1) >= enough, scaled.shape[0]
    )
    return in_top_k & ((ordered >= edge[:, None]) | (top_p >= 1.0)[:, None])


def _ordered_bits(x: Float[Array, "R V"]) -> UInt[Array, "R V"]:
    """Unsigned integers in the order of the floats."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest(holds: Callable[[UInt[Array, " R"]], Bool[Array, " R"]], rows: int) -> UInt[Array, " R"]:
    """The largest threshold for which `holds`, per row; it holds at 0 and stops holding once, as thresholds grow."""

    def bit(index: Int[Array, ""], threshold: UInt[Array, " R"]) -> UInt[Array, " R"]:
        candidate = threshold | (jnp.uint32(1 << 31) >> index.astype(jnp.uint32))
        return jnp.where(holds(candidate), candidate, threshold)

    found: UInt[Array, " R"] = lax.fori_loop(0, 32, bit, jnp.zeros(rows, jnp.uint32))
    return found
