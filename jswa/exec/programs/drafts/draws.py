"""Tokens that a drafter with weights draws: with the noise of the target's own draws.

The target's draw at a position is the largest of its logits by temperature plus noise, which depends on the request's
key and the position alone (`sampling`). A drafter that adds the same noise to its own logits mostly draws the same
token, as far as its probabilities are the target's; its likeliest token is right only as often as the target is sure.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jswa.exec.programs.sampling.rows import Sampling
from jswa.exec.programs.sampling.xla import row_keys
from jswa.model.collectives import argmax_columns, pmax, shard_columns


def draw_alike(
    logits: Float[Array, "R C"],
    positions: Int[Array, " R"],
    rows: Sampling,
    vocab: int,
    devices: int = 1,
    ids: Int[Array, "... V"] | None = None,
) -> Int[Array, " R"]:
    """Return the token that a drafter draws for each row; of rows with temperature 0 the likeliest.

    Limits (top_k, top_p, min_p) are left out, as they seldom forbid what is drawn, but for top_k = 1.

    Args:
        logits: of this device's share of the vocabulary, or of the tokens `ids`.
        positions: of the tokens to be drawn.
        vocab: tokens of the target.
        ids: [V], the tokens of the columns of all devices; or [R, C], those of each row, whose logits every device has.
    """
    random, several = (rows.temperature > 0) & (rows.top_k != 1), devices
    if ids is not None and ids.ndim == 2:
        several = 1

    def with_noise() -> Int[Array, " R"]:
        noise = jax.vmap(lambda key: jax.random.gumbel(key, (vocab,), jnp.float32))(row_keys(rows.keys, positions))
        if ids is not None:
            noise = noise[:, ids] if ids.ndim == 1 else jnp.take_along_axis(noise, ids, axis=1)
        # As in `sampling`: the largest logit is shifted to 0, so that a temperature near 0 does not overflow.
        shifted = logits - pmax(logits.max(axis=-1, keepdims=True), several)
        scaled = shifted / jnp.where(random, rows.temperature, 1.0)[:, None]
        return argmax_columns(jnp.where(random[:, None], scaled + shard_columns(noise, several), shifted), several)

    best: Int[Array, " R"] = lax.cond(random.any(), with_noise, lambda: argmax_columns(logits, several))
    if ids is None:
        return best
    if ids.ndim == 1:
        chosen: Int[Array, " R"] = ids.at[best].get(mode="clip")
        return chosen
    return jnp.take_along_axis(ids, best[:, None], axis=-1)[:, 0]
