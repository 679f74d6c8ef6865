"""The static parameters and groups of arrays of routing.

Shape letters: S parts, T tokens, M the model's width, E experts, k experts of a token, R rows, B entries of a list of
tiles.
"""

from typing import Literal, NamedTuple

from jaxtyping import Array, Float, Int

from pallas_kernels.errors import NoRoutingKernel
from pallas_kernels.experts.groups import Groups

_MOST_EXPERTS = 1_024

Score = Literal["softmax", "sigmoid", "top_k_softmax", "top_k_sigmoid"]


class Router(NamedTuple):
    """How experts are chosen, in this order: factor, cap, score, choice, weights; ties go to the lowest index.

    Attributes:
        score: "softmax" and "sigmoid" rank experts by these scores and use them as weights; "top_k_softmax" and
            "top_k_sigmoid" rank experts by logits and apply the function to the chosen logits.
        top_k: k.
        factor: of the logits.
        softcap: logits become softcap · tanh(logit / softcap); 0: they do not.
        normalize: weights are divided by their sum + `eps`.
        scale: factor of the weights.
    """

    score: Score
    top_k: int
    factor: float = 1.0
    softcap: float = 0.0
    normalize: bool = False
    eps: float = 0.0
    scale: float = 1.0


class RouterWeights(NamedTuple):
    """A number of each expert, where the router has it.

    Attributes:
        bias: added to the logits.
        selection: added to the scores for the choice, but not to the weights.
        scale: factor of the expert's weight.
    """

    bias: Float[Array, " E"] | None = None
    selection: Float[Array, " E"] | None = None
    scale: Float[Array, " E"] | None = None


class Routed(NamedTuple):
    """The experts of each token, and the rows of each expert.

    Attributes:
        chosen: experts of each token, best first.
        weights: of these, float32.
        groups: the rows of each expert; see `groups`.
        rows: the row of each pair of a token and one of its experts.
        pair: the pair of each row, t · k + j; 0 for rows that belong to no expert.
        tiles: a list for each tiling; see `groups.list_tiles`.
        inputs: the token of each row, where the kernel copies them; rows that belong to no expert hold anything.
    """

    chosen: Int[Array, "T k"]
    weights: Float[Array, "T k"]
    groups: Groups
    rows: Int[Array, "T k"]
    pair: Int[Array, " R"]
    tiles: tuple[Int[Array, "B 4"], ...]
    inputs: Float[Array, "R M"] | None = None


def require_held(experts: int, router: Router) -> None:
    """Raise NoRoutingKernel if the kernel does not hold so many experts."""
    if not router.top_k <= experts <= _MOST_EXPERTS:
        raise NoRoutingKernel(f"{experts} experts: routing=triton takes {router.top_k} (top_k) to {_MOST_EXPERTS}")
