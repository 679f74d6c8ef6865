"""The groups of arrays and the static parameters of sampling.

Shape letters: R rows, V numbers of the vocabulary, K drafts of a row, N tokens that a row may not generate, M rows of
the tables of constraints, B biases, W words of 32 bits, P places behind drafts.
"""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int, UInt

# The limits and penalties of a row, the first columns of its record: floats by their bits, but for top_k.
OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition", "presence", "frequency", "top_n_sigma")
GREEDY, FREE, COUNTED, NUCLEUS = range(4)  # kinds of rows: no draw, no limits, top-k, min-p or top-n-sigma, only top-p


class SamplingRows(NamedTuple):
    """The rows of a step.

    Attributes:
        temperature: 0 is greedy.
        top_k, top_p, min_p, top_n_sigma: 0, 1, 0 and 0 are off. min_p and top_n_sigma come first, then top_k, then
            top_p of what is left.
        repetition, presence, frequency: penalties; 1, 0 and 0 are off.
        keys: of jax.random, threefry2x32; `positions` are folded in.
        table: which row of the tables has the row's constraints; -1: it has none, and no penalties either.
        by_place: whether the mask of a token behind drafts is that of its place (`Tables.ahead`).
        finite: False: the row gets no token.
        drafts: tokens before the one that is drawn, which penalties count; those that are negative are none.
        banned: tokens that are forbidden; those past the vocabulary are none.
    """

    temperature: Float[Array, " R"]
    top_k: Int[Array, " R"]
    top_p: Float[Array, " R"]
    min_p: Float[Array, " R"]
    repetition: Float[Array, " R"]
    presence: Float[Array, " R"]
    frequency: Float[Array, " R"]
    top_n_sigma: Float[Array, " R"]
    keys: UInt[Array, "R 2"]
    positions: Int[Array, " R"]
    table: Int[Array, " R"]
    by_place: Int[Array, " R"]
    finite: Bool[Array, " R"]
    drafts: Int[Array, "R K"]
    banned: Int[Array, "R N"]


class Tables(NamedTuple):
    """What rows with constraints have generated and may generate.

    Attributes:
        seen: how often a row has generated each token, in the low 15 bits; any bit: the row has seen the token.
        mask: bits of the allowed tokens.
        ahead: the masks behind a row's drafts, by place; None if no row has any.
        bias_ids, bias: what is added to logits; ids past the vocabulary are none.
    """

    seen: UInt[Array, "M V"]
    mask: Int[Array, "M W"]
    ahead: Int[Array, "M P W"] | None
    bias_ids: Int[Array, "M B"]
    bias: Float[Array, "M B"]


class Logprobs(NamedTuple):
    """Log probabilities of the tokens that are drawn.

    Attributes:
        chosen: under the model, without constraints, temperature and limits.
        rank: of the token among all, from 1.
        ids, values: the most likely tokens, best first; of equal ones the first.
        drawn: in the distribution that the token was drawn from; 0 of greedy rows.
    """

    chosen: Float[Array, " R"]
    rank: Int[Array, " R"]
    ids: Int[Array, "R top"]
    values: Float[Array, "R top"]
    drawn: Float[Array, " R"]


class Drawn(NamedTuple):
    """What is drawn, and from what.

    A token's distance is (largest logit - its logit) / temperature, where constraints have changed the logits.

    Attributes:
        tokens: or a negative code.
        reach: the largest distance of a token that the limits keep; infinite without limits, 0 of greedy rows.
        mass: the sum of exp(-distance) over the tokens that the limits keep; 1 of greedy rows.
    """

    tokens: Int[Array, " R"]
    reach: Float[Array, " R"]
    mass: Float[Array, " R"]
    logprobs: Logprobs | None


class Codes(NamedTuple):
    """The codes of rows without a token: not finite, or every token is forbidden."""

    not_finite: int
    none_allowed: int


class Tuning(NamedTuple):
    """Sizes of the kernels, powers of two.

    Attributes:
        sub: columns of a block.
        chunk: blocks that a thread block of the first kernel reads at a time: few, so that several thread blocks fit on
            a multiprocessor.
        readers: thread blocks of the first kernel, if rows are fewer.
        tile: blocks that a thread block of the second kernel reads at a time.
        listed: tokens within reach that it lists, a multiple of 128. If there are more, it reads again.
        drawers: thread blocks of the second kernel, if rows are fewer: rows without limits are drawn by several.
    """

    sub: int = 128
    chunk: int = 8
    readers: int = 512
    tile: int = 32
    listed: int = 4_096
    drawers: int = 256


DEFAULT = Tuning()
