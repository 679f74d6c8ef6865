"""What the ribs of a program's variant compute of all tokens of a step."""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jswa.exec.buckets import Bucket
from jswa.exec.pack import Inputs
from jswa.exec.programs.config import StepConfig, decoder_of
from jswa.exec.programs.indices import StepIndices, places_of
from jswa.model.transformer import Params
from jswa.ribs.hooks import TokenRows
from jswa.ribs.traced import HOOKS

_BLOCK = 128  # tokens of which a hook computes the logits at once


def of_tokens(
    config: StepConfig, params: Params, hidden: Float[Array, "T M"], inputs: Inputs, indices: StepIndices
) -> dict[str, Any]:
    """Return what each rib computes of the hidden states of a step without drafts, by its name."""
    # A deterministic engine takes as many tokens as a step has rows: the numbers are those of sampled tokens.
    block = config.bucket.rows if config.deterministic else _BLOCK
    logits, sums, devices = decoder_of(config, params).logits, config.kernels.sums, config.model.devices
    rows = partial(_token_rows, indices, config.bucket)
    hooks = HOOKS[config.variant].forwarded
    return {name: hook(logits, hidden, inputs.section, rows, block, devices, sums) for name, hook in hooks.items()}


def _token_rows(indices: StepIndices, bucket: Bucket) -> TokenRows:
    """Return whose the tokens are."""
    return TokenRows(jnp.where(indices.real, indices.token_rows, bucket.rows), places_of(indices, bucket)[:, 0])
