"""Which drafts are right: those that equal the token that is drawn in their place.

A draw is a function of the request's key, the position and the logits. So the token at a position is the same whether a
step before has sampled it or this one verifies a draft of it: drafts change no text, only how many tokens a step adds.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jswa.exec.programs.logits_state import LogitsState
from jswa.exec.programs.sampling import kernels
from jswa.exec.programs.sampling.rows import Sampling
from jswa.exec.programs.sampling.xla import few_rows, limits_of, sample
from jswa.ribs.hooks import Hooks
from pallas_kernels.elementwise.sums import Implementation as Sums
from pallas_kernels.sampling.api import Implementation as Sampler

ABSENT = -3  # among drafts: there is none; no draw is -3
LOGITS = 2**26  # numbers of the logits that exist at the same time, unless one token of each row has more


class Draws(NamedTuple):
    """What is drawn at S places of R rows, in their order: the tokens, and what the hook of each rib returns."""

    tokens: Int[Array, "R S"]
    beside: Mapping[str, Any]


def logits_at_once(rows: int, places: int, vocab: int, tokens: int) -> int:
    """Return the numbers of the logits that exist at the same time: those of all places if they are few, or of one.

    `tokens`: of the step, behind each of which one token is drawn at most.
    """
    every = min(tokens, rows * places) * vocab
    return every if every <= LOGITS else rows * vocab


def draw(
    logits: Callable[[Float[Array, "N M"]], Float[Array, "N V"]],
    hidden: Float[Array, "R S M"],
    first: Int[Array, " R"],
    drafts: Int[Array, "R K"],
    limits: Sampling,
    state: LogitsState,
    finite: Bool[Array, "R S"],
    *,
    runs: Bool[Array, " R"],
    room: int,
    vocab: int,
    devices: int,
    hooks: Hooks | None,
    deterministic: bool,
    sampler: Sampler = "xla",
    sums: Sums = "xla",
) -> Draws:
    """Draw a token for each row's last token and, behind each draft, for the draft (S = K + 1).

    The logits of all places at once may be gigabytes: then those of one place of all rows follow those of another. A
    deterministic engine always computes them so, as if it sampled one token of each row. Where rows share the tokens of
    a step, only the places with a token are computed; the draws at the others are 0.

    Args:
        logits: the head.
        first: position of the first token that is drawn of each row.
        runs: which rows run.
        room: tokens of the step at most.
        hooks: of the variant, if it computes something of draws; None: it does not.
        sampler, sums: see `sample`.
    """
    rows, places, _ = hidden.shape
    place = jnp.arange(places, dtype=jnp.int32)[None]
    dead = place > proposed(drafts)[:, None]

    def spread(values: Array) -> Array:
        return jnp.broadcast_to(values[:, None], (rows, places, *values.shape[1:]))

    wide = Sampling(*(spread(values) for values in limits))
    # No one uses the draw behind the last draft of a row, so neither limits nor masks are computed for it.
    cold = jnp.where(dead, 0.0, wide.temperature)
    wide = wide._replace(temperature=cold, logits_state=jnp.where(dead, len(state["seen"]), wide.logits_state))
    # What is drawn behind a draft is drawn as if that were part of the text.
    before = jnp.where(place[..., :-1][:, None] < place[..., None], drafts[:, None], ABSENT)
    parts = hidden, first[:, None] + place, wide, finite, before

    def block(part: tuple[Float[Array, "N M"], Int[Array, " N"], Sampling, Bool[Array, " N"], Array]) -> Draws:
        vectors, positions, own, whole, drafted = part
        ahead = drafted if places > 1 else None
        with jax.named_scope("logits"):
            scores = logits(vectors)
        asked, reach, done = Hooks({}) if hooks is None else hooks, None, dict[str, Any]()
        with jax.named_scope("sampling"):
            if sampler == "triton":
                top = next(iter(asked.top.values()), None)
                tokens, reach, _, beside = kernels.sample(scores, positions, own, state, whole, ahead, top=top)
                done = dict.fromkeys(asked.top, beside)
            else:
                few = 0 if deterministic else few_rows(len(positions))
                tokens = sample(scores, positions, own, state, devices, whole, few, ahead, sums)
        hooks_left = {name: hook for name, hook in asked.drawn.items() if name not in done}
        if not hooks_left:
            return Draws(tokens, done)
        random, limited = limits_of(scores, positions, own, state, devices, ahead, sums, reach)
        found = {name: hook(scores, tokens, random, limited, devices, sums) for name, hook in hooks_left.items()}
        return Draws(tokens, done | found)

    if places == 1 or (not deterministic and logits_at_once(rows, places, vocab, room) > rows * vocab):
        flat = jax.tree.map(lambda array: array.reshape(rows * places, *array.shape[2:]), parts)
        live = (runs[:, None] & ~dead).reshape(-1)
        drawn = _of_some(block, flat, live, room) if room < rows * places else block(flat)
        return drawn._replace(tokens=drawn.tokens.reshape(rows, places))
    return _by_place(block, parts, places, loop=deterministic)


def _by_place(draws: Callable[[Any], Draws], parts: Any, places: int, *, loop: bool) -> Draws:
    """Return the draws of one place of all rows after those of another. `parts`: arrays [R, S, ...].

    `loop`: in a loop of the device. A loop cannot be part of a CUDA graph.
    """
    if loop:
        by_place = lax.map(draws, jax.tree.map(lambda array: jnp.moveaxis(array, 1, 0), parts))
    else:
        # The barrier keeps one place's logits from those of the next.
        found: list[Draws] = []
        for at in range(places):
            part = jax.tree.map(lambda array, at=at: array[:, at], parts)
            if found:
                part, _ = lax.optimization_barrier((part, found[-1].tokens))  # type: ignore[no-untyped-call]
            found.append(draws(part))
        by_place = jax.tree.map(lambda *arrays: jnp.stack(arrays), *found)
    whole: Draws = jax.tree.map(lambda array: jnp.moveaxis(array, 0, 1), by_place)
    return whole._replace(beside=jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), whole.beside))


def _of_some(draws: Callable[[Any], Draws], parts: Any, live: Bool[Array, " N"], room: int) -> Draws:
    """Return the draws at the live places, at most `room`, and 0 at the others. `parts`: arrays [N, ...]."""
    size = len(live)
    numbers = jnp.where(live, jnp.cumsum(live, dtype=jnp.int32) - 1, room)
    chosen = jnp.full(room, size, jnp.int32).at[numbers].set(jnp.arange(size, dtype=jnp.int32), mode="drop")
    some = draws(jax.tree.map(lambda array: array.at[chosen].get(mode="clip"), parts))
    found: Draws = jax.tree.map(
        lambda own: jnp.zeros((size, *own.shape[1:]), own.dtype).at[chosen].set(own, mode="drop"), some
    )
    return found


def proposed(drafts: Int[Array, "R K"]) -> Int[Array, " R"]:
    """Return the number of drafts of each row: what lies behind an absent one is none."""
    if not drafts.shape[1]:  # of which XLA cannot compile the product for several devices
        return jnp.zeros(len(drafts), jnp.int32)
    return jnp.cumprod(drafts >= 0, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)


def accepted(draws: Int[Array, "R S"], drafts: Int[Array, "R K"]) -> Int[Array, " R"]:
    """Return how many of each row's drafts are right: the first ones that equal the token drawn in their place.

    A draft behind which no token can be drawn does not count, so that the next step finds out why.
    """
    if not drafts.shape[1]:
        return jnp.zeros(len(drafts), jnp.int32)
    right = (draws[:, :-1] == drafts) & (draws[:, 1:] >= 0)
    return jnp.cumprod(right, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)
