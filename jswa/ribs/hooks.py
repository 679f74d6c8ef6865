"""The seam between the jitted step and its ribs: hooks, chosen when a program is traced. A plain program has none."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.elementwise.sums import Implementation as Sums


class TokenRows(NamedTuple):
    """Whose the T tokens of a step are: the row of each by its index in the plan, R for padding; each row's last token.

    The last token of a row that the plan does not have is any.
    """

    row: Int[Array, " T"]
    last: Int[Array, " R"]


@runtime_checkable
class Forwarded(Protocol):
    """Called after the forward pass of a variant with `every`."""

    def __call__(
        self,
        logits: Callable[[Float[Array, "B M"]], Float[Array, "B V"]],
        hidden: Float[Array, "T M"],
        section: Int[Array, " T"],
        rows: Callable[[], TokenRows],
        block: int,
        devices: int,
        sums: Sums,
    ) -> Any:
        """Return arrays `[T, …]` or `[R, …]` for the host.

        Args:
            logits: the head, for at most `block` tokens at a time.
            rows: whose the tokens are.
        """
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
    """What the ribs of a variant compute in a step.

    Attributes:
        forwarded: by the rib's name; empty unless the variant has `every`.
        drawn: by the rib's name.
        top: by the name of a rib whose `drawn` the sampling kernels compute themselves: how many of the most likely
            tokens they return beside the draw.
    """

    forwarded: Mapping[str, Forwarded]
    drawn: Mapping[str, Drawn] = {}
    top: Mapping[str, int] = {}

    def beside(self, other: "Hooks") -> "Hooks":
        """Return the hooks of a variant of both."""
        assert len(self.top) + len(other.top) <= 1, "the sampling kernels serve one rib"
        forwarded, drawn = {**self.forwarded, **other.forwarded}, {**self.drawn, **other.drawn}
        return Hooks(forwarded, drawn, {**self.top, **other.top})
