"""What few rows need to change their logits: token counts, biases and masks, in a small table of places.

Counts follow the tokens that the step runs, before it samples: whatever a row has run is what it has seen.
"""

from typing import TypedDict

import jax.numpy as jnp
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


def set_place(extras: Extras, place: Int[Array, ""], mask: Int[Array, " words"], bias: Float[Array, " V"]) -> Extras:
    """Give a place to a new row: its bias and mask, nothing counted yet. The tables are donated."""
    return Extras(
        counts=extras["counts"].at[place].set(0),
        in_prompt=extras["in_prompt"].at[place].set(False),
        bias=extras["bias"].at[place].set(bias),
        mask=extras["mask"].at[place].set(mask),
    )


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
