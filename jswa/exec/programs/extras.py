"""What few rows need to change their logits: token counts, biases and masks, in a small table of places.

Counts follow the tokens that the step runs, before it samples: whatever a row has run is what it has seen. Tokens
that it does not run, because their KV is cached, are counted when it gets its place.
"""

from typing import TypedDict

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


class Extras(TypedDict):
    """Part of the device state; E places, V tokens. A row's place is set with the row's first step.

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


def init_extras(places: int, vocab: int) -> Extras:
    """Tables without any entry."""
    return Extras(
        counts=jnp.zeros((places, vocab), jnp.int32),
        in_prompt=jnp.zeros((places, vocab), bool),
        bias=jnp.zeros((places, vocab), jnp.float32),
        mask=jnp.full((places, -(-vocab // 32)), -1, jnp.int32),
    )


def set_place(
    extras: Extras,
    place: Int[Array, ""],
    mask: Int[Array, " words"],
    bias: Float[Array, " V"],
    seen: Int[Array, " V"],
) -> Extras:
    """Give a place to a new row: bias, mask, and the tokens that it will not run. The tables are donated.

    `seen` is twice how often a token is among the generated ones of these, plus one where it is in the prompt.
    """
    return Extras(
        counts=extras["counts"].at[place].set(seen >> 1),
        in_prompt=extras["in_prompt"].at[place].set((seen & 1) == 1),
        bias=extras["bias"].at[place].set(bias),
        mask=extras["mask"].at[place].set(mask),
    )


def seen_counts(skipped: Int[np.ndarray, " S"], prompt_length: int, vocab: int) -> Int[np.ndarray, " V"]:
    """`seen` of `set_place` for the tokens that a row skips, prompt first."""
    prompt, generated = skipped[:prompt_length], skipped[prompt_length:]
    seen = 2 * np.bincount(generated, minlength=vocab).astype(np.int32)
    seen[prompt] |= 1
    return seen


def set_mask(mask: Int[Array, "E words"], place: Int[Array, ""], row: Int[Array, " words"]) -> Int[Array, "E words"]:
    """Change a row's mask alone. The table is donated."""
    return mask.at[place].set(row)


def count_tokens(
    extras: Extras, tokens: Int[Array, " T"], places: Int[Array, " T"], generated: Bool[Array, " T"]
) -> Extras:
    """Enter the tokens that a step runs; places past the end are dropped."""
    counts = extras["counts"].at[places, tokens].add(generated.astype(jnp.int32), mode="drop")
    prompt_places = jnp.where(generated, len(extras["counts"]), places)
    in_prompt = extras["in_prompt"].at[prompt_places, tokens].set(True, mode="drop")
    return {**extras, "counts": counts, "in_prompt": in_prompt}
