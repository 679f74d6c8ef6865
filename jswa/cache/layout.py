"""Where the KV of every layer lies in the arena: lanes, slabs and the two page views (docs/design/kv-memory.md).

    lane 0   [ slab 0 | slab 1 | slab 2 | … ]      one array per lane, the same slab ids in all lanes
    slab     local page: p tokens of each local layer of the lane
             or m full pages: p tokens each of the lane's one full layer

A page id is one number that is valid in every lane, so a table has one entry per page, not per layer.
Elements are counted per device, after KV heads have been sharded or replicated.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from jswa.architecture import AttentionConfig, AttentionKind, ModelConfig, Reach
from jswa.errors import ConfigError, UnsupportedModel


@dataclass(frozen=True)
class KindLayout:
    """The page view of one kind of layer: an array `[pages, layers_per_page, num_kv_heads, page_size / parts, row]`.

    A `row` is the KV of one token and head: K and V side by side.

    Attributes:
        parts: of the `devices` that share the model, those that share the tokens of a page: each has a cell for every
            `parts`-th of them.
    """

    num_layers: int
    num_kv_heads: int
    row: int
    v_head_dim: int
    layers_per_page: int
    pages_per_slab: int
    parts: int = field(default=1, repr=False)
    devices: int = field(default=1, repr=False)

    @property
    def elems(self) -> int:
        """Elements of one token in one layer."""
        return self.num_kv_heads * self.row


@dataclass(frozen=True)
class LayerKV:
    """Where the KV that one layer reads lies, its own or another layer's. `index`: among the layers of a page."""

    kind: AttentionKind
    lane: int
    index: int


@dataclass(frozen=True)
class KVLayout:
    """The arena's geometry, derived from the model alone.

    Attributes:
        page_size: tokens per page (p).
        num_lanes: arrays of the arena (G).
        slab_elems: elements of one slab in one lane.
        reach: what a local layer sees; None without local layers.
        full, local: the page view of each kind, None where the model has no such layer.
        layers: one entry per model layer.
        devices: that have such an arena each, for their KV heads.
        drafts: the page view of each full layer of a drafter. Its lane has a cell for every full page id of the arena.
        draft_layers: one entry per layer of the drafter that stores KV; the lane of a full one is counted in `drafts`.
    """

    page_size: int
    num_lanes: int
    slab_elems: int
    reach: Reach | None
    full: KindLayout | None
    local: KindLayout | None
    layers: tuple[LayerKV, ...]
    devices: int = field(default=1, repr=False)
    drafts: tuple[KindLayout, ...] = ()
    draft_layers: tuple[LayerKV, ...] = ()

    @property
    def draft_slab_elems(self) -> tuple[int, ...]:
        """Elements of one slab in each lane of a drafter."""
        return tuple(self.pages_per_slab * self.page_size * kind.elems for kind in self.drafts)

    @cached_property
    def pages_per_slab(self) -> int:
        """Full pages of one slab (m); 1 without full layers, so that a slot is a slab then."""
        return self.full.pages_per_slab if self.full else 1

    @cached_property
    def page_slots(self) -> int:
        """Slots of a page of each kind."""
        return (self.full is not None) + self.pages_per_slab * (self.local is not None)

    def slab_bytes(self, itemsize: int) -> int:
        """Return the bytes of one slab over all lanes, on each device."""
        return (self.num_lanes * self.slab_elems + sum(self.draft_slab_elems)) * itemsize

    def touch(self, tokens: int) -> int:
        """Return the pages that hold any run of `tokens` consecutive tokens, however it lies on the page grid."""
        return -(-(tokens - 1) // self.page_size) + 1 if tokens > 0 else 0

    def full_pages(self, length: int) -> int:
        """Return the full pages of a row of `length` tokens."""
        return -(-length // self.page_size) if self.full is not None else 0

    def window_pages(self, length: int) -> int:
        """Return the local pages that a row of `length` tokens may hold while it decodes."""
        if self.reach is None:
            return 0
        span = min(length, self.reach.span)
        return -(-span // self.page_size) if self.reach.chunked else self.touch(span)

    def resident_slots(self, length: int) -> int:
        """Return the slots of a row between two steps: the one formula of sizing and admission."""
        return self.full_pages(length) + self.pages_per_slab * self.window_pages(length)

    def step_reserve_slots(self, tokens: int, prefill_rows: int) -> int:
        """Return the slots that one step's prefill chunks take beyond the rows' windows, for all rows together."""
        if self.local is None:
            return 0
        return self.pages_per_slab * (-(-tokens // self.page_size) + prefill_rows)

    @staticmethod
    def of(model: ModelConfig, page_size: int, drafter: Sequence[AttentionConfig] = ()) -> "KVLayout":
        """Derive the layout.

        Args:
            drafter: the layers of a drafter that store KV. Its local layers lie among the model's, its full layers in
                lanes of their own.

        Raises UnsupportedModel where layers of one kind differ in shape or reach, or a chunk is no multiple of a page,
        and ConfigError if the devices that share the tokens of a page cannot have equal shares.
        """
        attention = [layer.attention for layer in model.layers] + [a for a in drafter if a.kind == "local"]
        owners = [a for a in attention if a.kv_from is None]
        full = [a for a in owners if a.kind == "full"]
        local = [a for a in owners if a.kind == "local"]
        _require_uniform(full, "full")
        _require_uniform(local, "local")
        reach = local[0].reach if local else None
        if reach is not None and reach.chunked and reach.size % page_size:
            raise UnsupportedModel(f"block_size = {page_size} must divide the model's attention chunk of {reach.size}")
        lanes = len(full) or len(local)
        local_per_lane = math.ceil(len(local) / lanes)
        shared = parts, _ = model.context_devices, model.devices
        if page_size % parts:
            raise ConfigError("block_size", page_size, f"must be a multiple of decode_context_parallel_size = {parts}")
        # Elements of a cell: of one token in a full page, and of `parts` tokens in a local one.
        full_elems, local_elems = (_elems(layers[0]) if layers else 0 for layers in (full, local))
        local_elems *= parts
        unit = math.lcm(*(e for e in (full_elems, local_elems) if e))
        cell = unit * math.ceil(max(local_per_lane * local_elems, full_elems) / unit)
        pages_per_slab = cell // full_elems if full else 1
        own = [a for a in drafter if a.kind == "full"]
        if own and not full:
            raise UnsupportedModel("a drafter with full layers needs a model that has full layers too")
        placed = _place(attention, local_per_lane)
        return KVLayout(
            page_size=page_size,
            num_lanes=lanes,
            slab_elems=page_size // parts * cell,
            reach=reach,
            full=_kind(full, layers_per_page=1, pages_per_slab=pages_per_slab, shared=shared) if full else None,
            local=_kind(local, layers_per_page=cell // local_elems, pages_per_slab=1) if local else None,
            layers=placed[: len(model.layers)],
            devices=model.devices,
            drafts=tuple(_kind([a], layers_per_page=1, pages_per_slab=pages_per_slab) for a in own),
            draft_layers=_place_drafts(drafter, placed[len(model.layers) :]),
        )


def _place(attention: list[AttentionConfig], local_per_lane: int) -> tuple[LayerKV, ...]:
    placed: list[LayerKV] = []
    counts = {"full": 0, "local": 0}
    for layer in attention:
        if layer.kv_from is not None:
            placed.append(placed[layer.kv_from])
            continue
        index = counts[layer.kind]
        counts[layer.kind] += 1
        lane, inner = (index, 0) if layer.kind == "full" else divmod(index, local_per_lane)
        placed.append(LayerKV(layer.kind, lane, inner))
    return tuple(placed)


def _place_drafts(drafter: Sequence[AttentionConfig], local: tuple[LayerKV, ...]) -> tuple[LayerKV, ...]:
    """Return where the KV of a drafter's layers lies, given that of its local ones."""
    locals_, lanes = iter(local), iter(range(len(drafter)))
    return tuple(LayerKV("full", next(lanes), 0) if a.kind == "full" else next(locals_) for a in drafter)


def _elems(layer: AttentionConfig) -> int:
    return layer.num_kv_heads * (layer.stored_head_dim + layer.v_head_dim)


def _kind(
    layers: list[AttentionConfig], *, layers_per_page: int, pages_per_slab: int, shared: tuple[int, int] = (1, 1)
) -> KindLayout:
    first = layers[0]
    return KindLayout(
        len(layers),
        first.num_kv_heads,
        row=first.stored_head_dim + first.v_head_dim,
        v_head_dim=first.v_head_dim,
        layers_per_page=layers_per_page,
        pages_per_slab=pages_per_slab,
        parts=shared[0],
        devices=shared[1],
    )


def _require_uniform(layers: list[AttentionConfig], name: str) -> None:
    shapes = {(a.num_kv_heads, a.stored_head_dim, a.v_head_dim, a.reach.size if a.reach else 0) for a in layers}
    if len(shapes) > 1 or len({a.reach for a in layers}) > 1:
        raise UnsupportedModel(
            f"{name} layers must share one shape (KV heads, head size, value size, window or chunk), "
            f"this model has {sorted(shapes)}"
        )
