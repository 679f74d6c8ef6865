"""Drafters without an engine: the tokens that one drafts behind each position of a text, with dense attention."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from jswa.architecture import AttentionConfig, ModelConfig
from jswa.model.drafters.seam import Drafter, Now, Ran
from jswa.model.transformer import Decoder, Params

Stored = dict[int, Float[Array, "T K E"]]


class Text:
    """A text that a target has run, and what a drafter stores of it.

    Args:
        hidden: by tap, the hidden states of all positions.
        stored: K and V of the target's layers, by number.
        target: the whole target; its embedding and logits, if the drafter reads them.
        broken: positions before which nothing was run: where a row began behind a cached prefix.
        temperature, seed: with which the text was drawn.
    """

    def __init__(
        self,
        drafter: Drafter,
        params: Params,
        config: ModelConfig,
        tokens: Int[np.ndarray, " T"],
        hidden: dict[int, Float[np.ndarray, "T M"]],
        *,
        stored: Stored | None = None,
        target: Decoder | None = None,
        broken: Collection[int] = (),
        temperature: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.temperature, self.seed = temperature, seed
        self.drafter, self.params, self.config, self.target = drafter, params, config, target
        self.tokens, self.stored = jnp.asarray(tokens), dict(stored or {})
        self.broken = jnp.asarray([at in {0, *broken} for at in range(len(tokens))])
        taps = tuple(jnp.asarray(hidden[tap]) for tap in drafter.taps)
        positions = jnp.arange(len(tokens), dtype=jnp.int32)
        ran = Ran(self.tokens, positions, taps, self._previous, self._embed, self._attend, self.stored.__setitem__)
        carry = drafter.absorb(params, ran)
        self.carry = jnp.zeros((len(tokens), 0)) if carry is None else carry

    def drafts(self, count: int) -> Int[np.ndarray, "T K"]:
        """Return the tokens drafted behind each position from 1 on; -1 in row 0."""
        rows = jnp.arange(1, len(self.tokens), dtype=jnp.int32)
        own: dict[tuple[int, int], Float[Array, "R K E"]] = {}

        def attend(step: int) -> Callable[..., Array]:
            return partial(self._attend_row, own, rows, step)

        def block(places: int, _: int) -> Callable[..., Array]:
            return partial(self._attend_block, rows, places)

        now = Now(
            self.tokens[1:], rows, self.carry[:-1], self._embed, self._logits, self._choose, attend, self._rows, block
        )  # fmt: skip
        found = np.asarray(self.drafter.propose(self.params, now, count))
        return np.concatenate([np.full((1, count), -1), found])

    def _previous(self, values: Shaped[Array, "T X"], _: slice) -> Shaped[Array, "T X"]:
        before = jnp.concatenate([jnp.zeros_like(values[:1]), values[:-1]])
        return jnp.where(self.broken[:, None], 0, before)

    def _embed(self, tokens: Int[Array, " n"]) -> Float[Array, "n M"]:
        if self.target is None:
            return jnp.zeros((len(tokens), self.config.d_model))
        rows: Array = self._rows(tokens) * self.config.embed_scale
        return rows

    def _rows(self, tokens: Int[Array, " n"]) -> Float[Array, "n M"]:
        assert self.target is not None
        rows: Array = self.target.embed[...][tokens]
        return rows

    def _logits(self, hidden: Float[Array, "n M"]) -> Float[Array, "n V"]:
        assert self.target is not None
        return self.target.logits(hidden)

    def _choose(
        self, logits: Float[Array, "n C"], step: int, ids: Int[Array, "... V"] | None = None
    ) -> Int[Array, " n"]:
        """Choose with the noise of the text's draws, the token behind that at `step` of each position from 1 on."""
        if self.temperature:
            key = jax.random.wrap_key_data(jnp.array([0, self.seed], jnp.uint32))
            vocab = (self.config.vocab_size,)
            noise = [jax.random.gumbel(jax.random.fold_in(key, 2 + step + row), vocab) for row in range(len(logits))]
            own = jnp.stack(noise)
            if ids is not None:
                own = jnp.stack([line[of] for line, of in zip(own, jnp.broadcast_to(ids, logits.shape), strict=True)])
            logits = logits / self.temperature + own
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        if ids is None:
            return best
        return jnp.broadcast_to(ids, logits.shape)[jnp.arange(len(best)), best]

    def _first(self, layer: int) -> int:
        return self.drafter.first[layer - len(self.config.layers)]

    def _layer(self, layer: int, attention: AttentionConfig | None) -> AttentionConfig:
        own = layer - len(self.config.layers)
        return attention or (self.drafter.layers[own] if own >= 0 else self.config.layers[layer].attention)

    def _attend(
        self,
        layer: int,
        q: Float[Array, "T H D"],
        kv: Float[Array, "T K E"] | None,
        sinks: Float[Array, " H"] | None,
        *,
        attention: AttentionConfig | None = None,
    ) -> Float[Array, "T H V"]:
        assert kv is not None
        self.stored[layer] = kv
        config, at = self._layer(layer, attention), np.arange(len(q))
        # Nothing sees the first positions, which lack a token before them; nothing reads what they give themselves.
        seen = (at[None] <= at[:, None]) & ((at[None] >= self._first(layer)) | (at[:, None] == at[None]))
        seen = seen if config.reach is None else seen & (at[None] > at[:, None] - config.reach.size)
        return _attended(config, q, jnp.broadcast_to(kv[None], (len(q), *kv.shape)), seen, sinks)

    def _attend_row(
        self,
        own: dict[tuple[int, int], Float[Array, "R K E"]],
        rows: Int[Any, " R"],
        step: int,
        layer: int,
        q: Float[Array, "R H D"],
        kv: Float[Array, "R K E"] | None,
        sinks: Float[Array, " H"] | None,
        *,
        attention: AttentionConfig | None = None,
    ) -> Float[Array, "R H V"]:
        """Attend from position n + step of each row: to what is stored before n, and to what the row itself stores."""
        config, stored = self._layer(layer, attention), self.stored[layer]
        drafted = layer >= len(self.config.layers)
        if kv is not None:
            own[layer, step] = kv
        mine = [own[layer, earlier] for earlier in range(step + 1)] if drafted else []
        at, rows = np.arange(len(stored) + len(mine)), np.asarray(rows)
        positions = np.where(at < len(stored), at, rows[:, None] + at - len(stored))
        seen = (positions < rows[:, None]) | (at[None] >= len(stored))
        seen &= positions >= (self._first(layer) if drafted else 0)
        # A query over the target's KV counts its window from n; see the seam.
        query = rows + (step if drafted else 0)
        seen = seen if config.reach is None else seen & (positions > query[:, None] - config.reach.size)
        keys = jnp.broadcast_to(stored[None], (len(rows), *stored.shape))
        keys = jnp.concatenate([keys, *(one[:, None] for one in mine)], axis=1)
        return _attended(config, q, keys, seen, sinks)

    def _attend_block(
        self,
        rows: Int[Any, " R"],
        places: int,
        layer: int,
        q: Float[Array, "n H D"],
        kv: Float[Array, "n K E"],
        sinks: Float[Array, " H"] | None,
        *,
        window: int | None,
        causal: bool,
    ) -> Float[Array, "n H V"]:
        """Attend from each place of a block: to what is stored before position n of its row, and to the block."""
        stored, first = self.stored[layer], np.asarray(rows)[:, None]
        own = jnp.moveaxis(kv.reshape(places, len(rows), *kv.shape[1:]), 0, 1)
        keys = jnp.concatenate([jnp.broadcast_to(stored[None], (len(rows), *stored.shape)), own], axis=1)
        at = np.arange(len(stored) + places)[None]
        positions = np.where(at < len(stored), at, first + at - len(stored))
        there, parts = (positions < first) | (at >= len(stored)), []
        for step, part in enumerate(jnp.split(q, places)):
            seen = there if window is None else there & (positions > first + step - window)
            seen = seen & (positions <= first + step) if causal else seen
            parts.append(_attended(self._layer(layer, None), part, keys, jnp.asarray(seen), sinks))
        return jnp.concatenate(parts)


def _attended(
    config: AttentionConfig,
    q: Float[Array, "T H D"],
    kv: Float[Array, "T S K E"],
    seen: Shaped[Array, "T S"],
    sinks: Float[Array, " H"] | None,
) -> Float[Array, "T H V"]:
    group = config.num_heads // config.num_kv_heads
    k, v = (jnp.repeat(part, group, axis=2) for part in (kv[..., : q.shape[-1]], kv[..., -config.v_head_dim :]))
    scores = jnp.einsum("thd,tshd->ths", q, k) * config.scale
    if config.softcap is not None:
        scores = config.softcap * jnp.tanh(scores / config.softcap)
    scores = jnp.where(jnp.asarray(seen)[:, None], scores, -jnp.inf)
    if sinks is not None:
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks[None, :, None], (*scores.shape[:2], 1))], axis=-1)
    shares = jax.nn.softmax(scores, axis=-1)[..., : v.shape[1]]
    return jnp.einsum("ths,tshd->thd", shares, v)
