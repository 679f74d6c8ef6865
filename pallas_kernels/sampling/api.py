"""`sample`: from logits to tokens in two kernels, with the draws of jax.random.

`jswa.exec.programs.sampling` is the reference: it reads the logits some forty times, for the digits of thresholds and
for noise of every token. Here one reading finds the largest logit of each block of columns, from which follows how far
from the largest of all a token can be and still be drawn. The second reads only blocks that have such tokens, and the
limits and the noise are left to these. The draws are the same, but for sums that are rounded otherwise. What a row does
not ask for costs it nothing: its record has a flag for it, and no kernel is launched for it.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import Sampling
from pallas_kernels.errors import NoSamplingKernel
from pallas_kernels.sampling.arguments import DEFAULT, Codes, Drawn, SamplingRows, Tables, Tuning

Implementation = Sampling

MOST_TOKENS = 4_096 * DEFAULT.sub  # of the vocabulary: one thread block holds a number of each block in registers


def sample(
    logits: Float[Array, "R V"],
    rows: SamplingRows,
    tables: Tables | None,
    codes: Codes,
    top: int | None = None,
    tuning: Tuning = DEFAULT,
) -> Drawn:
    """Draw a token of each row, under its constraints and limits.

    Args:
        tables: None: no row has constraints.
        codes: what rows without a token get.
        top: with log probabilities, and so many of the most likely tokens; None: without.

    Raises:
        NoSamplingKernel: the logits are not float32, or the vocabulary is too large.
        ImportError: jax-triton is not installed.
    """
    if logits.dtype != jnp.float32:
        raise NoSamplingKernel(f"logits of {logits.dtype}: sampling=triton takes float32")
    most = 4_096 * tuning.sub
    if logits.shape[1] > most:
        raise NoSamplingKernel(f"a vocabulary of {logits.shape[1]}: sampling=triton takes {most}")
    from pallas_kernels.sampling import call

    return call.sample(logits, rows, tables, codes, top, tuning)
