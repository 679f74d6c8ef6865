"""Computes every index that a layer needs, once at the top of the step.

A layer gets the indices of its kind as an argument; no pool or backend caches them. So the number of integer gathers in
a step does not depend on the number of layers (a test counts them).
"""

from collections.abc import Collection
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from jswa.architecture import Reach
from jswa.cache.layout import KVLayout
from jswa.exec.buckets import Bucket
from jswa.exec.pack import Inputs
from jswa.exec.programs.state import DeviceState
from jswa.plan import COLUMNS, FROM_DEVICE
from pallas_kernels.attention.api import TILE_TOKENS
from pallas_kernels.attention.rows import PagedRows, QueryTiles, tile_rows


class KindIndices(NamedTuple):
    """Where one kind of layer writes the step's tokens, and which pages its rows read.

    `last` is `rows` with each row's last token alone, for the layers at the end that store no KV.
    """

    write_pages: Int[Array, " T"]
    write_offsets: Int[Array, " T"]
    rows: PagedRows
    last: PagedRows


class StepIndices(NamedTuple):
    """The result of `step_indices`. `full` or `local` is None if the model has no such layer.

    Attributes:
        starts, counts: the first position that each row runs, and how many.
        drafts: how many of the last of these are drafts.
        first_token: index of each row's first token.
        positions, token_rows, token_row_ids: position, row and row id of each token.
        real: False for padding tokens, and for those of a row that would be past its limit.
        last_tokens: index of each row's last token.
        tiles: the query tiles of all tokens, by tokens per tile.
        last_tiles: the query tiles of each row's last token.
    """

    starts: Int[Array, " R"]
    counts: Int[Array, " R"]
    drafts: Int[Array, " R"]
    first_token: Int[Array, " R"]
    positions: Int[Array, " T"]
    token_rows: Int[Array, " T"]
    token_row_ids: Int[Array, " T"]
    real: Bool[Array, " T"]
    last_tokens: Int[Array, " R"]
    tiles: dict[int, QueryTiles]
    last_tiles: QueryTiles
    full: KindIndices | None
    local: KindIndices | None


class Spans(NamedTuple):
    """What each row runs; `starts`, `counts` and `drafts` as in `StepIndices`."""

    row_ids: Int[Array, " R"]
    starts: Int[Array, " R"]
    counts: Int[Array, " R"]
    drafts: Int[Array, " R"]

    def drafting(self, max_rows: int) -> Int[Array, " R"]:
        """Return the ids of the rows that have drafts; that of no row for the others."""
        found: Int[Array, " R"] = jnp.where(self.drafts > 0, self.row_ids, max_rows)
        return found


def enter_pages(state: DeviceState, inputs: Inputs, layout: KVLayout) -> DeviceState:
    """Return the state with the plan's page-table entries, of the kinds of layers that the model has."""
    full_table, local_table = state["full_table"], state["local_table"]
    if layout.full is not None:
        full_table = _enter(full_table, inputs.full_pages)
    if layout.local is not None:
        local_table = _enter(local_table, inputs.local_pages)
    return {**state, "full_table": full_table, "local_table": local_table}


def _enter(table: Int[Array, "max_rows N"], entries: Int[Array, "U 3"]) -> Int[Array, "max_rows N"]:
    """Return a page table with new entries; padding entries name a row that does not exist."""
    return table.at[entries[:, 0], entries[:, 1]].set(entries[:, 2], mode="drop")


def row_spans(inputs: Inputs, state: DeviceState, *, known: bool = False) -> Spans:
    """Return what each row runs.

    A row whose start the host does not know goes on at the state's length. Its last token is never run: positions from
    limit - 1 on are padding. `known`: the host knows all starts, so that nothing of this is computed.
    """
    row_ids, starts, counts = inputs.column("row_id"), inputs.column("start"), inputs.column("count")
    if not known:
        goes_on = starts == FROM_DEVICE
        starts = jnp.where(goes_on, state["length"].at[row_ids].get(mode="fill", fill_value=0), starts)
        counts = jnp.where(goes_on, jnp.clip(inputs.column("limit") - 1 - starts, 0, counts), counts)
    # Only drafts lie behind a row's limit.
    drafts = jnp.clip(inputs.column("samples") - 1, 0, jnp.maximum(counts - 1, 0))
    return Spans(row_ids, starts, counts, drafts)


def packed_first(inputs: Inputs, bucket: Bucket) -> Int[Array, " R"]:
    """Return the index of each row's first token in the packed inputs; see `pack`."""
    if bucket.decode:
        return jnp.arange(bucket.rows, dtype=jnp.int32) * (1 if bucket.shared else bucket.per_row)
    counts: Int[Array, " R"] = inputs.column("count")
    return jnp.cumsum(counts, dtype=jnp.int32) - counts


def running(inputs: Inputs, spans: Spans, drafts: Int[Array, " R"]) -> Inputs:
    """Return the inputs of a step whose rows run only so many of their drafts."""
    fewer, records = spans.drafts - drafts, inputs.rows
    changed = {"count": spans.counts, "samples": jnp.minimum(inputs.column("samples"), 1 + spans.drafts)}
    number = jnp.arange(len(COLUMNS), dtype=jnp.int32)[None]
    for name, values in changed.items():
        records = jnp.where(number == COLUMNS.index(name), (values - fewer)[:, None], records)
    return inputs._replace(rows=records)


def by_token(values: Shaped[Array, " R"], token_rows: Int[Array, " T"], bucket: Bucket) -> Shaped[Array, " T"]:
    """Return the value of each token's row: without a gather where rows have places, which XLA does not see by itself.

    `token_rows`: the row of each token; see `StepIndices`.
    """
    if not bucket.decode or bucket.shared:
        return values[token_rows]
    return values if bucket.per_row == 1 else jnp.repeat(values, bucket.per_row)


def _tokens_of_rows(
    planned: Int[Array, " R"], row: Int[Array, " R"], bucket: Bucket
) -> tuple[Int[Array, " R"], Int[Array, " T"], Int[Array, " T"]]:
    """Return the first token of each row, all tokens of the step, and the row of each of them.

    Args:
        planned: how many tokens each row has in the packed inputs.
        row: 0 to R - 1.
    """
    ends = jnp.cumsum(planned, dtype=jnp.int32)
    in_places = bucket.decode and not bucket.shared
    first_token = row * bucket.per_row if in_places else ends - planned
    token = jnp.arange(bucket.tokens, dtype=jnp.int32)
    if in_places:
        return first_token, token, token // bucket.per_row
    # All ends are compared: a binary search is a loop, and a loop cannot be part of a CUDA graph.
    found = (ends[None] <= token[:, None]).sum(axis=1, dtype=jnp.int32)
    return first_token, token, jnp.minimum(found, bucket.rows - 1)


def _pages_from(
    table: Int[Array, "max_rows N"], row_ids: Int[Array, " R"], first: Int[Array, " R"], width: int
) -> Int[Array, "R W"]:
    """Return so many pages of each row from page position `first` on; 0 where the table has none."""
    columns = first[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    # With mode="fill" XLA would compute in a kernel of its own which are there.
    there = (row_ids < len(table))[:, None] & (columns < table.shape[1])
    return jnp.where(there, table.at[row_ids[:, None], columns].get(mode="clip"), 0)


def step_indices(
    inputs: Inputs,
    state: DeviceState,
    *,
    layout: KVLayout,
    bucket: Bucket,
    tile_tokens: Collection[int] = (TILE_TOKENS,),
    known: bool = False,
) -> StepIndices:
    """Derive all gather and scatter indices of a step, int32.

    Padding tokens belong to the last row and are written to distinct pages past the end of the arena, that is, dropped.
    So is the full KV of tokens that a row replays for its local layers only. Page rows of local layers are cut to the
    window, so their width ⌈(W - 1 + chunk) / p⌉ + 1 does not depend on the context.

    Args:
        tile_tokens: tokens per query tile, one value for each tiling that a layer needs.
        known: see `row_spans`.
    """
    row_ids, starts, counts, drafts = row_spans(inputs, state, known=known)
    row = jnp.arange(bucket.rows, dtype=jnp.int32)
    first_token, token, token_row = _tokens_of_rows(inputs.column("count"), row, bucket)
    spread = partial(by_token, token_rows=token_row, bucket=bucket)
    real = token < spread(first_token + counts)
    positions = jnp.where(real, spread(starts - first_token) + token, 0)
    page, offset = positions // layout.page_size, positions % layout.page_size
    token_row_id = spread(row_ids)
    num_slabs = state["lanes"][0].shape[1]

    def kind(table: Int[Array, "max_rows N"], end: int, rows: PagedRows, written: Bool[Array, " T"]) -> KindIndices:
        # Padding is not written, so its page may be any.
        pages = table.at[token_row_id, page].get(mode="clip")
        last = rows._replace(starts=starts + jnp.maximum(counts - 1, 0), counts=jnp.minimum(counts, 1))
        return KindIndices(jnp.where(written, pages, end + token), offset, rows, last)

    full = local = None
    if layout.full is not None:
        page_rows = state["full_table"].at[row_ids].get(mode="fill", fill_value=0)
        rows = PagedRows(starts, counts, page_rows, jnp.zeros_like(starts), jnp.zeros_like(starts))
        # Earlier positions are in shared cache pages that already hold this KV: do not write them.
        written = real & (positions >= spread(inputs.column("full_write_from")))
        full = kind(state["full_table"], num_slabs * layout.full.pages_per_slab, rows, written)
    if layout.reach is not None:
        reach, longest = layout.reach, bucket.per_row if bucket.decode else bucket.tokens
        first_page = _first_seen(reach, starts) // layout.page_size
        table = state["local_table"]
        width = min(-(-(reach.span - 1 + longest) // layout.page_size) + 1, table.shape[1])
        page_rows = _pages_from(table, row_ids, first_page, width)
        rows = PagedRows(starts, counts, page_rows, first_page, inputs.column("local_visible_from"))
        local = kind(table, num_slabs, rows, real)
    most = bucket.per_row if bucket.decode else None
    tiles = {size: tile_rows(counts, first_token, token_row, size, most) for size in sorted(set(tile_tokens))}
    last_tiles = tile_rows(jnp.minimum(counts, 1), row, row, 1, 1)
    last_tokens = jnp.clip(first_token + counts - 1, 0, bucket.tokens - 1)
    return StepIndices(
        starts,
        counts,
        drafts,
        first_token,
        positions,
        token_row,
        token_row_id,
        real,
        last_tokens,
        tiles,
        last_tiles,
        full,
        local,
    )


def _first_seen(reach: Reach, starts: Int[Array, " R"]) -> Int[Array, " R"]:
    """Return the oldest position that a query at each start sees."""
    oldest: Int[Array, " R"] = reach.oldest(starts)
    return oldest if reach.chunked and not reach.lookback else jnp.maximum(oldest, 0)  # the first is never below 0


def row_ids_of(indices: StepIndices, max_rows: int) -> Int[Array, " R"]:
    """Return the ids of the rows that have drafts; that of no row for the others."""
    first = jnp.clip(indices.first_token, 0, len(indices.token_row_ids) - 1)
    return jnp.where(indices.drafts > 0, indices.token_row_ids[first], max_rows)


def places_of(indices: StepIndices, bucket: Bucket) -> Int[Array, "R S"]:
    """Return the tokens of the step behind which tokens are drawn: each row's last before its drafts, and these."""
    place = jnp.arange(1 + bucket.drafts, dtype=jnp.int32)[None]
    before = indices.first_token + indices.counts - 1 - indices.drafts
    return jnp.clip(before[:, None] + jnp.minimum(place, indices.drafts[:, None]), 0, bucket.tokens - 1)
