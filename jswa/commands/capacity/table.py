"""How many sequences' KV fits in memory, in jswa, ideally, and as vLLM and SGLang allocate it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jswa.architecture import AttentionConfig, ModelConfig
from jswa.cache.capacity import ideal_fraction
from jswa.cache.layout import KVLayout

LENGTHS = (2048, 8192, 32768, 131072)
# SGLang 0.5.23: the families whose windows get a pool of their own (is_hybrid_swa_model); others keep every token.
_WINDOW_POOLS = {
    "beam", "gemma4_text", "gemma4_unified_text", "gpt_oss", "granite_swa", "granitemoe_swa", "iquest_q1", "laguna",
    "llama4_text", "mellum", "mimo_v2", "mimo_v2_flash", "muse_glimmer_text", "step3p5",
}  # fmt: skip
FIXED_RATIO = 0.8  # SGLang's default --swa-full-tokens-ratio: tokens of the window pool per token of the full pool
_SLACK = 128  # tokens beyond the window that SGLang keeps in decode
_GROUP_PAGE = 16  # tokens per page in vLLM


@dataclass(frozen=True)
class CapacityRow:
    """KV of sequences (rows) of one length, in tokens: bytes per row, and the rows that fit in memory, with fractions.

    Attributes:
        bytes_here, rows_here: in jswa.
        bytes_ideal: every full layer keeps all tokens, every local layer its window, and nothing is rounded up.
        bytes_full, rows_full: every layer keeps all tokens.
        rows_fixed_ratio: in SGLang's two pools.
        rows_grouped: in vLLM's groups of layers.
    """

    length: int
    bytes_here: int
    bytes_ideal: int
    bytes_full: int
    rows_here: float
    rows_full: float
    rows_fixed_ratio: float
    rows_grouped: float

    @property
    def share_of_ideal(self) -> float:
        """Ideal bytes over the bytes that jswa takes."""
        return self.bytes_ideal / self.bytes_here


def table(
    model: ModelConfig, layout: KVLayout, *, itemsize: int, memory: int, lengths: Sequence[int] = LENGTHS
) -> list[CapacityRow]:
    """Return one Row per length. `memory` in bytes; `itemsize`: bytes per element of KV."""
    attention = [layer.attention for layer in model.layers if layer.attention.kv_from is None]
    # Other engines store keys and values without folding: bytes of one token in all layers of a kind.
    full = sum(_elems(a) for a in attention if a.kind == "full") * itemsize
    local = sum(_elems(a) for a in attention if a.kind == "local") * itemsize
    slab = layout.slab_bytes(itemsize)
    slots = (memory // slab - 1) * layout.pages_per_slab
    rows = []
    for length in lengths:
        resident = layout.resident_slots(length)
        here = math.ceil(resident * slab / layout.pages_per_slab)
        rows.append(
            CapacityRow(
                length,
                bytes_here=here,
                bytes_ideal=round(ideal_fraction(layout, length) * here),
                bytes_full=(full + local) * length,
                rows_here=slots / resident,
                rows_full=memory / ((full + local) * length),
                rows_fixed_ratio=_fixed_ratio_rows(model.family, full, local, layout, length, memory),
                rows_grouped=_grouped_rows(attention, layout, length, memory // itemsize),
            )
        )
    return rows


def _fixed_ratio_rows(family: str, full: int, local: int, layout: KVLayout, length: int, memory: int) -> float:
    """Return the rows that fit in SGLang's two pools; the window pool has `FIXED_RATIO` tokens per full token.

    `full`, `local`: bytes of one token in all layers of the kind. The fuller pool decides. Families that are not in
    `_WINDOW_POOLS` have one pool, in which every layer keeps every token.
    """
    if family not in _WINDOW_POOLS or layout.reach is None or not full:
        return memory / ((full + local) * length)
    full_tokens = memory / (full + FIXED_RATIO * local)
    held = min(length, layout.reach.span + _SLACK + layout.page_size)
    return min(full_tokens / length, full_tokens * FIXED_RATIO / held)


def _grouped_rows(attention: Sequence[AttentionConfig], layout: KVLayout, length: int, memory: int) -> float:
    """Return the rows that fit in vLLM's one pool: layers in groups as large as the smaller kind, the last one padded.

    A row has ⌈n / group⌉ page tables per kind. A local table holds the window and one page more; of chunked layers it
    holds the chunk, which begins at a page; chunks that are seen with the one before are a window to vLLM. It frees
    past chunks by default since 0.33.0: VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE is 1 in vllm/envs.py.
    `memory` in elements.
    """
    full = [_elems(a) for a in attention if a.kind == "full"]
    local = [_elems(a) for a in attention if a.kind == "local"]
    if layout.reach is None or not local:
        return memory / (sum(full + local) * length)
    group = min(len(kind) for kind in (full, local) if kind)
    page = _GROUP_PAGE * max(full + local)  # elements of one layer; a layer with smaller tokens fits more of them
    aligned = layout.reach.chunked and not layout.reach.lookback
    window = math.ceil(min(layout.reach.span, length) / (page // local[0])) + (not aligned)
    pages = math.ceil(len(local) / group) * window
    if full:
        pages += math.ceil(len(full) / group) * math.ceil(length / (page // full[0]))
    return memory / (pages * page * group)


def _elems(a: AttentionConfig) -> int:
    return a.num_kv_heads * (a.head_dim + a.v_head_dim)
