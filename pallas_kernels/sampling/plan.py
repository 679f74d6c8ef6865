"""The groups of arrays and the static parameters of sampling. Shape letters: R rows, V numbers of the vocabulary."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int

GREEDY, FREE, COUNTED, NUCLEUS = range(4)  # kinds of rows: no draw, no limits, top-k or min-p, top-p alone


class Limits(NamedTuple):
    """Limits of the draws. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off.

    min_p comes first, then top-k, then top-p of what is left.
    """

    temperature: Float[Array, " R"]
    top_k: Int[Array, " R"]
    top_p: Float[Array, " R"]
    min_p: Float[Array, " R"]


class Summary(NamedTuple):
    """The facts that one reading of the logits gives.

    Attributes:
        greedy: the first token with the largest logit.
        possible: whether any logit is more than -inf.
        finite: whether all are finite.
        tops: the largest logit of each block of columns.
        most: the largest of all, or the least float32 if all are less.
        reach: no token whose distance (largest - logit) / temperature is more can be drawn.
        total: the sum of exp(-distance) of all tokens; of rows with top-p alone.
    """

    greedy: Int[Array, " R"]
    possible: Bool[Array, " R"]
    finite: Bool[Array, " R"]
    tops: Float[Array, "R blocks"]
    most: Float[Array, " R"]
    reach: Float[Array, " R"]
    total: Float[Array, " R"]


class Tuning(NamedTuple):
    """Sizes of the kernels, powers of two.

    Attributes:
        sub: columns of a block.
        tile: blocks of a chunk, which one thread block reads.
        cap: tokens of a chunk among which a token is drawn, at most.
    """

    sub: int = 128
    tile: int = 32
    cap: int = 128


DEFAULT = Tuning()
