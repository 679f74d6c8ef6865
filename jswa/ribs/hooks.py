"""The seam between the jitted step and its ribs: hooks, chosen when a program is traced. A plain program has none."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.elementwise.sums import Implementation as Sums


@runtime_checkable
class Forwarded(Protocol):
    """Called after the forward pass of a variant with `every`."""

    def __call__(
        self,
        logits: Callable[[Float[Array, "B M"]], Float[Array, "B V"]],
        hidden: Float[Array, "T M"],
        section: Int[Array, " T"],
        block: int,
        devices: int,
        sums: Sums,
    ) -> Any:
        """Return arrays `[T, …]` for the host. `logits`: the head, for at most `block` tokens at a time."""
        ...


@runtime_checkable
class Drawn(Protocol):
    """Called after each draw of a variant that is not plain."""

    def __call__(
        self,
        logits: Float[Array, "N V"],
        tokens: Int[Array, " N"],
        random: Bool[Array, " N"],
        limited: Callable[[], Float[Array, "N V"]],
        devices: int,
        sums: Sums,
    ) -> Any:
        """Return arrays `[N, …]` for the host.

        Args:
            random: of which logits a token was drawn at random.
            limited: returns the logits from which it was drawn: after constraints, temperature and limits.
        """
        ...


class Hooks(NamedTuple):
    """What a rib computes in a step.

    Attributes:
        top: how many of the most likely tokens the sampling kernels return beside the draw; then these compute `drawn`.
    """

    forwarded: Forwarded
    drawn: Drawn
    top: int
