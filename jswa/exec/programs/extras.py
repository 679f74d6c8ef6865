"""Token counts, biases and masks of the few rows that have penalties or constraints, in a small table by extras id.

Each step counts the tokens that it runs before it samples. Tokens that a row skips, because their KV is cached, are
counted when the row gets its extras id.
"""

from typing import TypedDict

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


class Extras(TypedDict):
    """Part of the device state; E extras ids, V tokens. A row's entries are set before its first step.

    Attributes:
        counts: how often the row's text so far has each token.
        in_prompt: whether its prompt has it.
        bias: added to the logits.
        mask: bits of the allowed tokens, 32 a word.
    """

    counts: Int[Array, "E V"]
    in_prompt: Bool[Array, "E V"]
    bias: Float[Array, "E V"]
    mask: Int[Array, "E words"]


def init_extras(ids: int, vocab: int) -> Extras:
    """Tables without any entry."""
    return Extras(
        counts=jnp.zeros((ids, vocab), jnp.int32),
        in_prompt=jnp.zeros((ids, vocab), bool),
        bias=jnp.zeros((ids, vocab), jnp.float32),
        mask=jnp.full((ids, -(-vocab // 32)), -1, jnp.int32),
    )


def set_extras(
    extras: Extras,
    extras_id: Int[Array, ""],
    mask: Int[Array, " words"],
    bias: Float[Array, " V"],
    seen: Int[Array, " V"],
) -> Extras:
    """Set the entries of a new row: bias, mask, and the counts of the tokens that it skips. The tables are donated.

    `seen` is twice how often a token is among the generated ones of these, plus one where it is in the prompt.
    """
    return Extras(
        counts=extras["counts"].at[extras_id].set(seen >> 1),
        in_prompt=extras["in_prompt"].at[extras_id].set((seen & 1) == 1),
        bias=extras["bias"].at[extras_id].set(bias),
        mask=extras["mask"].at[extras_id].set(mask),
    )


def seen_counts(skipped: Int[np.ndarray, " S"], prompt_length: int, vocab: int) -> Int[np.ndarray, " V"]:
    """`seen` of `set_extras` for the tokens that a row skips, prompt first."""
    prompt, generated = skipped[:prompt_length], skipped[prompt_length:]
    seen = 2 * np.bincount(generated, minlength=vocab).astype(np.int32)
    seen[prompt] |= 1
    return seen


def set_mask(
    mask: Int[Array, "E words"], extras_id: Int[Array, ""], row: Int[Array, " words"]
) -> Int[Array, "E words"]:
    """Change a row's mask alone. The table is donated."""
    return mask.at[extras_id].set(row)


def count_tokens(
    extras: Extras, tokens: Int[Array, " T"], ids: Int[Array, " T"], generated: Bool[Array, " T"]
) -> Extras:
    """Count the tokens that a step runs; rows without an extras id name one past the end and are dropped."""
    counts = extras["counts"].at[ids, tokens].add(generated.astype(jnp.int32), mode="drop")
    prompt_ids = jnp.where(generated, len(extras["counts"]), ids)
    in_prompt = extras["in_prompt"].at[prompt_ids, tokens].set(True, mode="drop")
    return {**extras, "counts": counts, "in_prompt": in_prompt}
