"""A drafter with weights in a step: what it reads of the target's tokens, and where its KV lies.

The KV of a drafter lies at the pages of the target's: its local layers are more local layers, its full layers have
lanes of their own with a cell for every full page. So what is shared, copied or kept of the target is shared, copied
and kept of the drafter. At the end of a row its pages reach as far as the step's tokens do, drafts among them.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jswa.architecture import AttentionConfig, ModelConfig
from jswa.cache.layout import KindLayout, KVLayout, LayerKV
from jswa.exec.programs.attend import Cells, attend_pages, static, store_pages
from jswa.exec.programs.drafts.draws import draw_alike
from jswa.exec.programs.indices import KindIndices, StepIndices, row_ids_of
from jswa.exec.programs.sampling.rows import Sampling
from jswa.exec.programs.state import DeviceState
from jswa.kernels import Kernels
from jswa.model.drafters.seam import FINAL, BlockAttend, DraftAttend, Drafter, Now, Ran
from jswa.model.transformer import Decoder, Params
from pallas_kernels.attention.api import tile_tokens
from pallas_kernels.attention.rows import PagedRows, tile_rows

DRAFTER_PREFIX = "draft."  # of a drafter's parameters among the engine's
Scales = Callable[[int], Float[Array, "2 K"] | None]


def own_params(params: Params) -> Params:
    """Return the drafter's parameters among the engine's."""
    return {
        name.removeprefix(DRAFTER_PREFIX): value for name, value in params.items() if name.startswith(DRAFTER_PREFIX)
    }


@dataclass(frozen=True)
class Placed:
    """A drafter, and where it is.

    Attributes:
        per_row: tokens of a row in the step, at most.
    """

    drafter: Drafter
    model: ModelConfig
    layout: KVLayout
    kernels: Kernels
    per_row: int

    @property
    def tile_sizes(self) -> list[int]:
        """The query tokens per tile of the drafter's layers."""
        return [self.tile(attention) for attention in self.drafter.layers]

    def tile(self, attention: AttentionConfig) -> int:
        """Return the query tokens per tile of a layer."""
        group = attention.num_heads // attention.num_kv_heads
        return min(tile_tokens(self.kernels.attention, group), self.per_row)

    def propose(
        self,
        params: Params,
        decoder: Decoder,
        state: DeviceState,
        tokens: Int[Array, " R"],
        indices: StepIndices,
        count: int,
        *,
        rows: Sampling,
        scales: Scales,
    ) -> tuple[DeviceState, Int[Array, "R K"]]:
        """Return the state, with KV of drafts, and the drafts of the rows that have any in the step.

        Args:
            tokens: the last token of each row.
            rows: how the rows draw tokens.
            scales: of the KV of a layer of the target; None unless it has 8 bits.
        """
        lanes = _Lanes(state, self)
        row_ids, active = row_ids_of(indices, len(state["length"])), indices.drafts > 0
        starts = jnp.maximum(indices.starts, 1)

        def attend(step: int) -> DraftAttend:
            return _RowAttend(lanes, indices, row_ids, active, starts, step, scales, state)

        def block(count: int, drafts: int) -> BlockAttend:
            missing = jnp.maximum(drafts - indices.drafts, 0)
            return _BlockAttend(lanes, indices, row_ids, active, starts, count, missing, state)

        def choose(
            logits: Float[Array, "R C"], step: int, /, ids: Int[Array, "... V"] | None = None
        ) -> Int[Array, " R"]:
            size = self.model.vocab_size
            return draw_alike(logits, starts + step + 1, rows, size, self.model.devices, ids)

        carry = state["carry"]
        kept = jnp.zeros((len(tokens), 0)) if carry is None else carry.at[row_ids].get(mode="fill", fill_value=0)
        now = Now(
            tokens,
            starts,
            kept,
            decoder.inputs_of,
            decoder.logits,
            choose,
            attend,
            decoder.rows_of,
            block,
        )
        drafts = self.drafter.propose(own_params(params), now, count)
        return lanes.stored(), drafts

    def absorb(
        self,
        params: Params,
        decoder: Decoder,
        state: DeviceState,
        tokens: Int[Array, " T"],
        indices: StepIndices,
        taps: dict[int, Float[Array, "T M"]],
    ) -> tuple[DeviceState, Float[Array, "T C"] | None]:
        """Return the state with the drafter's KV of a step's tokens, and what is to be carried on behind each, if any.

        A drafter without layers stores nothing: it may be given some of the tokens alone.
        """
        lanes = _Lanes(state, self)
        attend = _StepAttend(lanes, indices)
        ran = Ran(
            tokens,
            indices.positions,
            tuple(taps[tap] for tap in self.drafter.taps),
            lambda values, columns: _previous(values, columns, state, indices),
            decoder.inputs_of,
            attend,
            attend.store,
        )
        carry = self.drafter.absorb(own_params(params), ran)
        return lanes.stored(), carry

    @property
    def only_last(self) -> bool:
        """Whether the drafter reads nothing but the hidden states from which tokens are drawn."""
        return not self.drafter.layers and self.drafter.taps == (FINAL,)


class _Lanes:
    """The lanes of a step while it is traced."""

    def __init__(self, state: DeviceState, placed: Placed) -> None:
        self.placed, self.state = placed, state
        self.lanes, self.draft_lanes = list(state["lanes"]), list(state["draft_lanes"])

    def stored(self) -> DeviceState:
        """Return the state with what has been written."""
        return {**self.state, "lanes": self.lanes, "draft_lanes": self.draft_lanes}

    def attention(self, layer: int) -> AttentionConfig:
        """Return the attention of a layer of the target or, behind these, of the drafter."""
        model, drafter = self.placed.model, self.placed.drafter
        count = len(model.layers)
        return drafter.layers[layer - count] if layer >= count else model.layers[layer].attention

    def place(self, layer: int) -> tuple[LayerKV, KindLayout, list[Float[Array, "1 slabs elems"]]]:
        """Return where the KV of a layer lies: its place, the view of pages, and the lanes among which its own is."""
        layout, count = self.placed.layout, len(self.placed.model.layers)
        own = layout.draft_layers[layer - count] if layer >= count else layout.layers[layer]
        if layer >= count and own.kind == "full":
            return own, layout.drafts[own.lane], self.draft_lanes
        shape = layout.full if own.kind == "full" else layout.local
        assert shape is not None
        return own, shape, self.lanes

    def run(
        self,
        layer: int,
        cells: Cells,
        attention: AttentionConfig,
        q: Float[Array, "T H D"],
        kv: Float[Array, "T K E"] | None,
        sinks: Float[Array, " H"] | None,
        kv_scales: Float[Array, "2 K"] | None = None,
    ) -> Float[Array, "T H V"]:
        """Write and attend in the lane of a layer."""
        own, shape, lanes = self.place(layer)
        lanes[own.lane], out = attend_pages(
            lanes[own.lane],
            q,
            kv,
            sinks,
            kv_scales,
            shape=shape,
            page_size=self.placed.layout.page_size,
            index=own.index,
            cells=cells,
            attend=static(attention),
            kernels=self.placed.kernels,
        )
        return out

    def seen_from(self, layer: int, rows: PagedRows) -> PagedRows:
        """Return rows whose tokens see no position of a layer of the drafter that has no token before it."""
        first = self.placed.drafter.first[layer - len(self.placed.model.layers)]
        return rows._replace(visible_from=jnp.maximum(rows.visible_from, first))


def _kind(indices: StepIndices, own: LayerKV) -> KindIndices:
    kind = indices.full if own.kind == "full" else indices.local
    assert kind is not None
    return kind


class _StepAttend:
    """Attention of the step's tokens, in layers of the drafter."""

    def __init__(self, lanes: _Lanes, indices: StepIndices) -> None:
        self._lanes, self._indices = lanes, indices

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
        """See `DraftAttend`."""
        lanes, config = self._lanes, self._lanes.attention(layer)
        kind = _kind(self._indices, lanes.place(layer)[0])
        tiles = self._indices.tiles[lanes.placed.tile(config)]
        cells = Cells(kind.write_pages, kind.write_offsets, lanes.seen_from(layer, kind.rows), tiles)
        return lanes.run(layer, cells, attention or config, q, kv, sinks)

    def store(self, layer: int, kv: Float[Array, "T K E"]) -> None:
        """See `Ran.store`."""
        own, shape, lanes = self._lanes.place(layer)
        kind = _kind(self._indices, own)
        lanes[own.lane] = store_pages(
            lanes[own.lane],
            kv,
            shape=shape,
            page_size=self._lanes.placed.layout.page_size,
            index=own.index,
            pages=kind.write_pages,
            offsets=kind.write_offsets,
        )


class _RowAttend:
    """Attention of one token of each row, `step` positions behind the row's last token."""

    def __init__(
        self,
        lanes: _Lanes,
        indices: StepIndices,
        row_ids: Int[Array, " R"],
        active: Bool[Array, " R"],
        starts: Int[Array, " R"],
        step: int,
        scales: Scales,
        state: DeviceState,
    ) -> None:
        self._lanes, self._indices, self._row_ids, self._scales = lanes, indices, row_ids, scales
        self._active, self._last, self._at = active, starts, starts + step
        self._written = active & (step <= indices.drafts)
        self._tables = {"full": state["full_table"], "local": state["local_table"]}

    def __call__(
        self,
        layer: int,
        q: Float[Array, "R H D"],
        kv: Float[Array, "R K E"] | None,
        sinks: Float[Array, " H"] | None,
        /,
        *,
        attention: AttentionConfig | None = None,
    ) -> Float[Array, "R H V"]:
        """See `DraftAttend`."""
        lanes, config = self._lanes, attention or self._lanes.attention(layer)
        own, shape, found = lanes.place(layer)
        rows, row = _kind(self._indices, own).rows, jnp.arange(len(q), dtype=jnp.int32)
        tiles = tile_rows(self._active.astype(jnp.int32), row, row, 1, 1)
        rows = rows._replace(counts=self._active.astype(jnp.int32))
        if layer < len(lanes.placed.model.layers):
            # The last token is not run yet: its window's other keys are those of a token before it, of one key less.
            assert config.reach is None or not config.reach.chunked, "the token before may be in another chunk"
            window = config.reach and dataclasses.replace(config.reach, size=config.reach.size - 1)
            cells = Cells(row, row, rows._replace(starts=self._last - 1), tiles)
            return lanes.run(
                layer, cells, dataclasses.replace(config, reach=window), q, None, sinks, self._scales(layer)
            )
        page_size = lanes.placed.layout.page_size
        pages = self._tables[own.kind].at[self._row_ids, self._at // page_size].get(mode="fill", fill_value=0)
        unused = found[own.lane].shape[1] * shape.pages_per_slab + row
        rows = lanes.seen_from(layer, rows._replace(starts=self._at))
        cells = Cells(jnp.where(self._written, pages, unused), self._at % page_size, rows, tiles)
        return lanes.run(layer, cells, config, q, kv, sinks)


class _BlockAttend:
    """Attention of `count` tokens of each row, from the row's last token on, the first token of all rows first.

    Each query is a row of its own for the kernels, because all queries of a block may see the same last key.
    `missing`: how many of the last tokens each row's block does not have.
    """

    def __init__(
        self,
        lanes: _Lanes,
        indices: StepIndices,
        row_ids: Int[Array, " R"],
        active: Bool[Array, " R"],
        starts: Int[Array, " R"],
        count: int,
        missing: Int[Array, " R"],
        state: DeviceState,
    ) -> None:
        step, rows = jnp.repeat(jnp.arange(count, dtype=jnp.int32), len(starts)), partial(jnp.tile, reps=count)
        self._lanes, self._full, self._table = lanes, indices.full, state["full_table"]
        self._active, self._row_ids, self._at = rows(active), rows(row_ids), rows(starts) + step
        self._last, self._of_rows = rows(starts + count - 1 - missing), rows

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
        """See `BlockAttend`."""
        lanes, index = self._lanes, jnp.arange(len(q), dtype=jnp.int32)
        own, shape, found = lanes.place(layer)
        assert self._full is not None
        page_size, full = lanes.placed.layout.page_size, self._full.rows
        pages = self._table.at[self._row_ids, self._at // page_size].get(mode="fill", fill_value=0)
        unused = found[own.lane].shape[1] * shape.pages_per_slab + index
        query = jnp.minimum(self._at, self._last)  # no query without keys, though nothing reads what it gives
        last = query if causal else self._last
        first = jnp.zeros_like(last) if window is None else jnp.maximum(query - (window - 1), 0)
        counts = self._active.astype(jnp.int32)
        page_rows = jnp.tile(full.page_rows, (len(q) // len(full.starts), 1))
        rows = lanes.seen_from(layer, PagedRows(last, counts, page_rows, self._of_rows(full.first_page), first))
        tiles = tile_rows(counts, index, index, 1, 1)
        written = self._active & (self._at <= self._last)
        cells = Cells(jnp.where(written, pages, unused), self._at % page_size, rows, tiles)
        return lanes.run(layer, cells, lanes.attention(layer), q, kv, sinks)


def _previous(
    values: Shaped[Array, "T X"], columns: slice, state: DeviceState, indices: StepIndices
) -> Shaped[Array, "T X"]:
    """Return the values of the token before each: of a row's first token, what the row has carried on.

    Zeros if it has not: then the row begins here, with its text or behind a cached prefix.
    """
    carry, first = state["carry"], indices.first_token
    assert carry is not None
    row_ids = indices.token_row_ids[jnp.clip(first, 0, len(values) - 1)]
    known = state["length"].at[row_ids].get(mode="fill", fill_value=-1) == indices.starts
    own = carry.at[row_ids].get(mode="fill", fill_value=0)[:, columns].astype(values.dtype)
    own = jnp.where((known & (indices.starts > 0))[:, None], own, 0)
    return jnp.concatenate([values[:1], values[:-1]]).at[first].set(own, mode="drop")
