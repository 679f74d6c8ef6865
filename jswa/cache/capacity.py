"""How much fits the arena: the arithmetic of sizing and admission, in slots (docs/design/kv-memory.md)."""

import bisect
import math

import numpy as np
from jaxtyping import Int

from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.errors import ConfigError


def peak_slots(layout: KVLayout, max_tokens: int, length: int) -> int:
    """Return the slots that a row of `length` tokens needs at its peak, in steps of at most `max_tokens`.

    The peak of local pages is the last prefill chunk beside the window before it.
    """
    chunk = min(max_tokens, length)
    local = layout.touch(min(length, layout.reach.span - 1 + chunk)) if layout.reach is not None else 0
    return layout.full_pages(length) + layout.pages_per_slab * local


def row_capacity(layout: KVLayout, limits: Limits, total_slots: int) -> int:
    """Return the longest row (prompt and generated tokens) that the arena can always serve, up to max_model_len."""
    lengths = range(1, limits.max_model_len + 1)
    return bisect.bisect_right(lengths, total_slots, key=lambda n: peak_slots(layout, limits.max_tokens, n))


def slabs_for(layout: KVLayout, limits: Limits, length: int) -> int:
    """Return the slabs of the smallest arena that always serves a row of `length` tokens, with the zero slab."""
    return 1 + math.ceil(peak_slots(layout, limits.max_tokens, length) / layout.pages_per_slab)


def too_little(
    layout: KVLayout, limits: Limits, asked: int | None, *, memory: int, itemsize: int, capacity: int
) -> ConfigError:
    """Return the error for memory that holds no request of the length that the user has `asked` for, or of 2 tokens.

    It says how much memory holds such a request, and one of max_model_len.

    Args:
        memory: bytes for the arena, on each device.
        itemsize: bytes of an element.
        capacity: tokens of the longest request that it holds.
    """
    needed = "".join(
        f", {slabs_for(layout, limits, length) * layout.slab_bytes(itemsize):,} bytes one of {length:,}"
        for length in sorted({asked or 2, limits.max_model_len})
    )
    half = "--dtype bfloat16, which takes half, " if itemsize == 4 else ""
    return ConfigError(
        "max_model_len" if asked else "kv_cache_memory_bytes",
        asked or memory,
        f"{memory:,} bytes of KV memory hold a request of {capacity:,} tokens{needed}; give more memory, {half}a "
        "smaller max_model_len, or a smaller max_num_batched_tokens",
    )


def useful_slabs(layout: KVLayout, limits: Limits) -> int:
    """Return the slabs that all rows can use: each at max_model_len, one step's reserve, the zero slab."""
    rows = limits.max_rows * layout.resident_slots(limits.max_model_len)
    reserve = layout.step_reserve_slots(limits.max_tokens, limits.max_rows)
    return 1 + math.ceil((rows + reserve) / layout.pages_per_slab)


def rows_held(layout: KVLayout, total_slots: int, length: int) -> int:
    """Return how many rows of `length` tokens fit the arena together."""
    return total_slots // layout.resident_slots(length)


def ideal_fraction(layout: KVLayout, length: int) -> float:
    """Return the bytes that a row of `length` tokens must keep over the bytes that it takes here.

    The difference is padding of slabs to a common unit, unused layers of local pages, and the rest of the last page.
    """
    ideal = 0.0
    if layout.full is not None:
        ideal += layout.full.num_layers * layout.full.elems * length / layout.full.parts
    if layout.local is not None and layout.reach is not None:
        ideal += layout.local.num_layers * layout.local.elems * min(length, layout.reach.span)
    taken = layout.resident_slots(length) / layout.pages_per_slab * layout.num_lanes * layout.slab_elems
    return ideal / taken


def padding(layout: KVLayout) -> float:
    """Return the share of a slab that no layer uses, as a local page, or as full pages if there are none."""
    kind = layout.local or layout.full
    if kind is None:
        return 0.0
    used = kind.num_layers / layout.num_lanes * kind.elems * layout.page_size / kind.parts
    return 1 - used / layout.slab_elems


class ResidentSlots:
    """`KVLayout.resident_slots` of many rows at once. The slots of windows are looked up by length."""

    def __init__(self, layout: KVLayout) -> None:
        longest = 0 if layout.reach is None else layout.reach.span
        windows = [layout.pages_per_slab * layout.window_pages(length) for length in range(longest + 1)]
        self._windows, self._page, self._has_full = np.array(windows), layout.page_size, layout.full is not None

    def __call__(self, lengths: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Return the slots of rows of these lengths."""
        slots: Int[np.ndarray, " n"] = self._windows.take(lengths, mode="clip")
        return slots + (lengths + (self._page - 1)) // self._page if self._has_full else slots
