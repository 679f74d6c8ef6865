"""Log probabilities in the jitted step: of drawn tokens, and of prompts."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jswa.model.collectives import gather_column, pmax, psum, top_columns
from jswa.ribs.hooks import Hooks, TokenRows
from jswa.ribs.logprobs.host import NAME, PROMPT, SAMPLED
from jswa.types import MAX_LOGPROBS
from pallas_kernels.elementwise import sums as own
from pallas_kernels.elementwise.sums import Implementation as Sums


class LogprobRows(NamedTuple):
    """Log probabilities for N choices: the chosen token's, its rank from 1, and the most likely tokens with theirs.

    `drawn`: the chosen token's after penalties, temperature and limits; 0 if greedy. None for tokens of prompts.
    """

    chosen: Float[Array, " N"]
    rank: Int[Array, " N"]
    ids: Int[Array, "N top"]
    values: Float[Array, "N top"]
    drawn: Float[Array, " N"] | None = None


def logprob_rows(
    logits: Float[Array, "N V"], chosen: Int[Array, " N"], devices: int = 1, sums: Sums = "xla"
) -> LogprobRows:
    """Return log probabilities of the model itself, before penalties, temperature and limits."""
    logprobs = log_softmax(logits, devices, sums)
    own = gather_column(logprobs, jnp.maximum(chosen, 0), devices)
    values, ids = top_columns(logprobs, min(MAX_LOGPROBS, logits.shape[1] * devices), devices)
    rank = psum((logprobs > own).sum(axis=-1, dtype=jnp.int32), devices) + 1
    return LogprobRows(own[:, 0], rank, ids.astype(jnp.int32), values)


def forwarded(
    logits: Callable[[Float[Array, "B M"]], Float[Array, "B V"]],
    hidden: Float[Array, "T M"],
    section: Int[Array, " T"],
    rows: Callable[[], TokenRows],
    block: int,
    devices: int,
    sums: Sums = "xla",
) -> LogprobRows:
    """Return log probabilities of each token's successor, block by block: all logits at once would be gigabytes.

    `section`: the successors.
    """
    size = min(block, len(hidden))
    pad = -len(hidden) % size
    with jax.named_scope("logprobs"):
        blocks = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(-1, size, hidden.shape[1])
        wanted = jnp.pad(section, (0, pad)).reshape(-1, size)
        found: LogprobRows = lax.map(
            lambda block: logprob_rows(logits(block[0]), block[1], devices, sums), (blocks, wanted)
        )
        whole: LogprobRows = jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:])[: len(hidden)], found)
    return whole


def drawn(
    logits: Float[Array, "N V"],
    tokens: Int[Array, " N"],
    random: Bool[Array, " N"],
    limited: Callable[[], Float[Array, "N V"]],
    devices: int = 1,
    sums: Sums = "xla",
) -> LogprobRows:
    """Return log probabilities of the tokens that were drawn; arguments as of `hooks.Drawn`."""

    def behind_limits() -> Float[Array, " N"]:
        kept = log_softmax(limited(), devices, sums)
        return jnp.where(random, gather_column(kept, jnp.maximum(tokens, 0), devices)[:, 0], 0.0)

    with jax.named_scope("logprobs"):
        found = lax.cond(random.any(), behind_limits, lambda: jnp.zeros(len(tokens), jnp.float32))
        return logprob_rows(logits, tokens, devices, sums)._replace(drawn=found)


def log_softmax(logits: Float[Array, "N V"], devices: int, sums: Sums = "xla") -> Float[Array, "N V"]:
    """Return log probabilities over the columns of all devices."""
    if devices == 1:
        return own.log_softmax(logits, sums)
    shifted = logits - pmax(logits.max(axis=-1, keepdims=True), devices)
    return shifted - jnp.log(psum(jnp.exp(shifted).sum(axis=-1, keepdims=True), devices))


HOOKS = {
    SAMPLED: Hooks({}, {NAME: drawn}, {NAME: MAX_LOGPROBS}),
    PROMPT: Hooks({NAME: forwarded}, {NAME: drawn}, {NAME: MAX_LOGPROBS}),
}
