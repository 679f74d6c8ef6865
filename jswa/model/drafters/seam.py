"""What a drafter with weights implements, and what a step gives it. All of it is called at trace time, inside the step.

A row's text has tokens x_0 … x_n on the device: x_0 … x_{n-1} have been run, x_n has been sampled and not run. A step

1. lets the drafter `propose` the tokens x_{n+1} …, for rows that speculate, before it runs anything;
2. runs the target's layers on x_n and the drafts, and collects the taps of every token that it runs;
3. lets the drafter `absorb` them: of every token that it runs, of prompts and drafts alike, in every step;
4. verifies, and keeps of each row the carry of the last token that was right.

So a drafter needs no token that is not run in this step, and no state but its carry and the KV of its own layers.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int, Shaped

from jswa.architecture import AttentionConfig
from jswa.model.transformer import Params

FINAL = -1  # a tap: the hidden states after the final norm, from which the logits are made


@runtime_checkable
class DraftAttend(Protocol):
    """Stores KV and attends, for the tokens that were given to the drafter; as `jswa.model.attention.Attend`."""

    def __call__(
        self,
        layer: int,
        q: Float[Array, "T H D"],
        kv: Float[Array, "T K E"] | None,
        sinks: Float[Array, " H"] | None,
        /,
        *,
        attention: AttentionConfig | None = None,
    ) -> Float[Array, "T H V"]:
        """Return the attention output.

        Args:
            layer: i from 0 on is layer i of the target; `len(target.layers) + i` is layer i of the drafter.
            kv: None: store nothing, read what is there.
            attention: scale, window and softcap of the queries; None: those of the layer.
        """
        ...


@runtime_checkable
class BlockAttend(Protocol):
    """Stores KV and attends, for a block of tokens of each row, whose queries may see the whole block."""

    def __call__(
        self,
        layer: int,
        q: Float[Array, "n H D"],
        kv: Float[Array, "n K E"],
        sinks: Float[Array, " H"] | None,
        /,
        *,
        window: int | None,
        causal: bool,
    ) -> Float[Array, "n H V"]:
        """Return the attention output.

        Args:
            layer: `len(target.layers) + i` is layer i of the drafter, a full one.
            kv: stored before the first query reads.
            window: keys that a query sees at most up to its own position, its own included; None: all.
            causal: a query sees no later position of the block.
        """
        ...


class Choose(Protocol):
    """Chooses tokens from a drafter's logits, as the target will from its own: with its noise and temperature."""

    def __call__(
        self, logits: Float[Array, "n C"], step: int, /, ids: Int[Array, "... V"] | None = None
    ) -> Int[Array, " n"]:
        """Return the token at position n + step + 1 of each row.

        Args:
            ids: None: the logits are of this device's columns of the target's vocabulary. [V]: the tokens of the
                columns of all devices. [n, C]: those of each row, whose logits every device has.
        """
        ...


class Ran(NamedTuple):
    """The T tokens of a step, after the target has run them. Padding tokens have position 0 and write nothing.

    Attributes:
        taps: for each of `Drafter.taps`, the residual stream before that layer of the target, or FINAL.
        previous: given values [T, X] of the tokens, and the columns of the carry that have the same of the token before
            a row's first one, returns [T, X]: the values of the token before each. Zeros for position 0, and for the
            first token that a row runs behind a cached prefix.
        embed: the target's embedding of tokens as its first layer gets it, [n] -> [n, M].
        attend: for these tokens. A token of a full layer of the drafter sees position 1 and later ones alone, as
            position 0 has no token before it.
        store: stores KV of these tokens in a layer of the drafter, numbered as for `attend`, and attends to nothing.
    """

    tokens: Int[Array, " T"]
    positions: Int[Array, " T"]
    taps: tuple[Float[Array, "T M"], ...]
    previous: Callable[[Shaped[Array, "T X"], slice], Shaped[Array, "T X"]]
    embed: Callable[[Int[Array, " n"]], Float[Array, "n M"]]
    attend: DraftAttend
    store: Callable[[int, Float[Array, "T K E"]], None]


class Now(NamedTuple):
    """The R rows of a step that speculates, before it runs. Rows that propose nothing have any valid values.

    Attributes:
        tokens, positions: x_n and n of each row.
        carry: of the row's token n - 1.
        embed, logits: the target's: [n] -> [n, M], and [n, M] (as FINAL) -> float32 [n, V], this device's columns.
        rows: the target's embedding, neither scaled nor normed: [n] -> [n, M].
        choose: a token of each row, given logits: the likeliest if the row is greedy; see `Choose`.
        attend: `attend(step)` is the function for one token a row at position n + step, of the drafter's own layers and
            of the target's. What it stores is overwritten when that position is really run. A query sees all that is
            stored at and before its position: of the target's layers, that is up to position n - 1.
        block: `block(count, drafts)` is the function for the `count` tokens of each row at positions n, n + 1 …, the
            first token of all rows first, that give so many drafts. The block of a row that runs fewer drafts lacks so
            many of the last tokens: they are neither stored nor seen.
    """

    tokens: Int[Array, " R"]
    positions: Int[Array, " R"]
    carry: Float[Array, "R C"]
    embed: Callable[[Int[Array, " n"]], Float[Array, "n M"]]
    logits: Callable[[Float[Array, "n M"]], Float[Array, "n V"]]
    choose: Choose
    attend: Callable[[int], DraftAttend]
    rows: Callable[[Int[Array, " n"]], Float[Array, "n M"]]
    block: Callable[[int, int], BlockAttend]


@runtime_checkable
class Drafter(Protocol):
    """A drafter's configuration and functions: hashable, equal if the configuration is (a frozen dataclass).

    `params` are the drafter's own, by their names.
    """

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers of the target before which the residual stream is wanted, or FINAL.

        One past the last layer: what the last layer gives.
        """
        ...

    @property
    def layers(self) -> tuple[AttentionConfig, ...]:
        """The drafter's layers with KV of their own; they lie in the arena behind the target's. () if it has none."""
        ...

    @property
    def first(self) -> tuple[int, ...]:
        """Of each of `layers`, the first position whose KV is seen."""
        ...

    @property
    def most(self) -> int:
        """The most tokens that `propose` gives."""
        ...

    @property
    def carry(self) -> int:
        """C, the numbers of a row that are kept between steps; 0: nothing is kept."""
        ...

    def shard(self, devices: int) -> "Drafter":
        """Return one device's part, as `shard_config`. Raises ConfigError if the drafter cannot be split so."""
        ...

    def absorb(self, params: Params, ran: Ran) -> Float[Array, "T C"] | None:
        """Write the drafter's KV of a step's tokens; return the carry of each, None if there is nothing to carry."""
        ...

    def propose(self, params: Params, now: Now, count: int) -> Int[Array, "R count"]:
        """Return the next tokens of each row as the drafter would choose them, -1 where there is none.

        `count`: static, 1 to 7.
        """
        ...
