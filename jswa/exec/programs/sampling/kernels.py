"""Sampling inside the step on the kernels of `pallas_kernels.sampling`, for one GPU: the draws of `xla`."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jswa.exec.programs.logits_state import LogitsState, banned_tokens
from jswa.exec.programs.sampling.rows import Sampling
from jswa.plan import NOT_FINITE, NOTHING_ALLOWED
from pallas_kernels.sampling import api
from pallas_kernels.sampling.arguments import OPTIONS, Codes, Drawn, SamplingRows, Tables

_CODES = Codes(NOT_FINITE, NOTHING_ALLOWED)


def sample(
    logits: Float[Array, "R V"],
    positions: Int[Array, " R"],
    rows: Sampling,
    state: LogitsState,
    finite: Bool[Array, " R"],
    drafts: Int[Array, "R K"] | None = None,
    *,
    top: int | None = None,
) -> Drawn:
    """Sample a token per row; arguments as of `xla.sample`.

    `top`: return its log probabilities too, and so many of the most likely tokens; None: without.

    Raises NoSamplingKernel if the kernels cannot serve the logits.
    """
    constrained = rows.logits_state < len(state["seen"])
    table = jnp.where(constrained, rows.logits_state, -1)
    none = jnp.zeros((len(logits), 0), jnp.int32)
    own = SamplingRows(
        **{name: getattr(rows, name) for name in OPTIONS},
        keys=rows.keys,
        positions=positions,
        table=table,
        by_place=rows.by_place,
        finite=finite,
        drafts=none if drafts is None else drafts,
        banned=banned_tokens(state, jnp.maximum(table, 0), positions, rows.prompt_length),
    )
    ahead = None if drafts is None else state["ahead"]
    tables = Tables(state["seen"], state["mask"], ahead, state["bias_ids"], state["bias"])
    top = None if top is None else min(top, logits.shape[1])
    return api.sample(logits, own, tables, _CODES, top)
