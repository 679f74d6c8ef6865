"""`summarize` and `draw`: tokens from logits that are read about once, with the draws of jax.random.

Today's form in `jswa.exec.programs.sampling` is the reference: it reads the logits some forty times, for the digits of
thresholds and for noise of every token. Here one reading finds the largest logit of each block of columns, from which
follows how far from the largest of all a token can be and still be drawn. The second reads only blocks that have such
tokens, and the limits and the noise are left to these. The draws are the same, but for sums that are rounded otherwise.
"""

from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from pallas_kernels.errors import NoSamplingKernel
from pallas_kernels.sampling import call
from pallas_kernels.sampling.plan import DEFAULT, Limits, Summary, Tuning

# "xla" is that of jswa; so is "cpu", but for sums, which the library of CPU kernels adds (`pallas_kernels.glue.sums`).
Implementation = Literal["xla", "triton", "cpu"]

_MOST_BLOCKS = 4_096  # that one thread block holds in registers


def summarize(logits: Float[Array, "R V"], limits: Limits, tuning: Tuning = DEFAULT) -> Summary:
    """Read the logits once.

    Raises:
        NoSamplingKernel: the logits are not float32, or the vocabulary is too large.
        ImportError: jax-triton is not installed.
    """
    _check(logits, tuning)
    return call.summarize(logits, limits, tuning)


def draw(
    logits: Float[Array, "R V"], keys: UInt[Array, "R 2"], limits: Limits, summary: Summary, tuning: Tuning = DEFAULT
) -> tuple[Int[Array, " R"], Bool[Array, " R"]]:
    """Draw a token of each row; return also whether it is undecided: then the token means nothing.

    A row is undecided if a chunk of the vocabulary has more tokens to choose from than `tuning.cap`, or if its sums do
    not reach top-p in float32. Rows without a possible token never are.

    Args:
        keys: threefry2x32 of each draw; the noise of a token is that of `jax.random.gumbel(key, (V,))`.
        summary: of these logits and limits.
    """
    _check(logits, tuning)
    tokens, undecided = call.draw(logits, lax.bitcast_convert_type(keys, jnp.int32), limits, summary, tuning)
    return tokens, (undecided == 1) & summary.possible


def _check(logits: Float[Array, "R V"], tuning: Tuning) -> None:
    if logits.dtype != jnp.float32:
        raise NoSamplingKernel(f"logits of {logits.dtype}: sampling_backend = triton takes float32")
    if logits.shape[1] > _MOST_BLOCKS * tuning.sub:
        raise NoSamplingKernel(
            f"a vocabulary of {logits.shape[1]}: sampling_backend = triton takes {_MOST_BLOCKS * tuning.sub}"
        )
