"""What the sampling of a step reads of its rows, and what a step gives the host. R rows, V tokens."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt

from jswa.plan import SAMPLING, SAMPLING_REALS


class Sampling(NamedTuple):
    """Sampling parameters by row, [R] each; `keys` [R, 2]. The columns of `plan.SAMPLING`."""

    temperature: Float[Array, " R"]
    top_k: Int[Array, " R"]
    top_p: Float[Array, " R"]
    min_p: Float[Array, " R"]
    repetition: Float[Array, " R"]
    presence: Float[Array, " R"]
    frequency: Float[Array, " R"]
    keys: UInt[Array, "R 2"]
    logits_state: Int[Array, " R"]
    prompt_length: Int[Array, " R"]
    by_place: Int[Array, " R"]
    top_n_sigma: Float[Array, " R"]

    @staticmethod
    def of(columns: Int[Array, "R C"]) -> "Sampling":
        """Read the packed columns; floats and keys are stored as their bits."""
        column = {name: columns[:, index] for index, name in enumerate(SAMPLING)}
        column |= {name: lax.bitcast_convert_type(column[name], jnp.float32) for name in SAMPLING_REALS}
        keys = jnp.stack([column.pop("key_high"), column.pop("key_low")], axis=-1)
        return Sampling(**column, keys=lax.bitcast_convert_type(keys, jnp.uint32))


class StepOutputs(NamedTuple):
    """Outputs for the host: tokens of each row, and what a rib's hooks return.

    The token is NOT_FINITE if the KV or the logits of any of the row's tokens are not, also for rows that sample none.

    Attributes:
        tokens: [R], or, of a step with drafts, [R, 1 + drafts + 2]: behind the tokens drawn, how many of them count,
            and how many drafts there were. In a step without drafts PAST_LIMIT is the token of a row that ran nothing.
        drawn: of each token drawn, in the order of `tokens`, by the rib's name; empty if no rib asks for anything.
        forwarded: of each token or row of the step, by the rib's name; empty unless its variant has `every`.
        experts, prompt_experts: of the token before each one drawn, and of each token of the step, in the L layers with
            experts; −1 where a layer has fewer than k.
    """

    tokens: Int[Array, " R"] | Int[Array, "R n"]
    drawn: Mapping[str, Any] = {}
    forwarded: Mapping[str, Any] = {}
    experts: Int[Array, "N L k"] | None = None
    prompt_experts: Int[Array, "T L k"] | None = None


class Beside(NamedTuple):
    """The outputs of the first half; see `StepOutputs`."""

    forwarded: Mapping[str, Any] = {}
    experts: Int[Array, "N L k"] | None = None
    prompt_experts: Int[Array, "T L k"] | None = None
