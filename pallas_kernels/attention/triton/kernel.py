"""The Triton kernel of paged attention. Importing this module imports Triton.

The softmax over blocks of keys is online (Milakov and Gimelshein 2018, arXiv 1805.02867), queries and heads of a group
are rows of one product (FlashAttention 2, arXiv 2307.08691), and in decode several thread blocks share a row's keys
(Flash-Decoding).
"""

from typing import no_type_check

import triton
import triton.language as tl

ITEM = tl.constexpr(5)
_LOWEST = tl.constexpr(-1e30)  # finite, so that a row without visible keys makes no NaN
_LOG2_E = tl.constexpr(1.4426950408889634)

# no_type_check: Triton compiles the source of these functions, and cannot compile the checks that tests add to it.


@triton.jit
@no_type_check
def attend(
    q: tl.tensor,  # [T, H, D]
    kv: tl.tensor,  # [P, S, K, p, E]
    items: tl.tensor,  # [B, 5]: row, position of the first query, live queries, first page, lowest visible position
    tokens: tl.tensor,  # [B, Q]: indices of the queries in q and out; unused if Q = 1: then item b is of token b
    page_rows: tl.tensor,  # [R, N]
    sinks: tl.tensor,  # [H] or None
    layer_index: tl.tensor,  # cells of a page before the layer's: its index · K · p
    out: tl.tensor,  # [T, H, V], or with splits or parts [splits, T, H, V] in float32
    lse: tl.tensor,  # [splits, T, H] or None: base-2 logarithm of the softmax's sum
    TOKENS: tl.constexpr,  # T; unused without lse
    QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    LAYERS_PER_PAGE: tl.constexpr,
    PAGE: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,  # E
    D: tl.constexpr,
    D_MAIN: tl.constexpr,  # D and V are cut into two powers of two each, of which the second may be 0
    D_REST: tl.constexpr,
    V: tl.constexpr,
    V_MAIN: tl.constexpr,
    V_REST: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none. With CHUNK, a query sees WINDOW keys before its chunk
    CHUNK: tl.constexpr,  # 0: none
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,  # 0.0: none
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Attend to one split of the keys of one KV head, with up to ROWS queries times heads of one tile."""
    tile, chunk = tl.program_id(0) // CHUNKS, tl.program_id(0) % CHUNKS
    kv_head, split = tl.program_id(1), tl.program_id(2)
    row = tl.load(items + tile * ITEM)
    first_query = tl.load(items + tile * ITEM + 1)
    live = tl.load(items + tile * ITEM + 2)
    first_page = tl.load(items + tile * ITEM + 3)
    lowest = tl.load(items + tile * ITEM + 4)

    index = chunk * ROWS + tl.arange(0, ROWS)
    query, head = index // GROUP, kv_head * GROUP + index % GROUP
    held = query < live
    if QUERIES == 1:
        token = tl.zeros([ROWS], tl.int64) + tile
        stored = query < 1  # also of padding tokens, which get zeros
    else:
        token = tl.load(tokens + tile * QUERIES + query, mask=held, other=0).to(tl.int64)
        stored = held
    out_row = token * (KV_HEADS * GROUP) + head  # of [T, H]
    position = first_query + query

    # Keys that some query sees. Other cells are not read: they may hold NaN, and 0 · NaN is NaN.
    first, last = chunk * ROWS // GROUP, tl.minimum((chunk * ROWS + ROWS - 1) // GROUP, live - 1)
    begin = tl.maximum(lowest, _first_visible(first_query + first, WINDOW, CHUNK))
    keys = first_query + last + 1 if PARTS == 1 else (first_query + last + 1) // PARTS
    end = tl.minimum(keys, (first_page + COLUMNS) * PAGE)
    end = tl.where(first < live, end, begin)
    first_block = begin // BLOCK
    blocks = tl.maximum((end + BLOCK - 1) // BLOCK - first_block, 0)
    share = (blocks + SPLITS - 1) // SPLITS
    from_block = first_block + tl.minimum(split * share, blocks)
    to_block = first_block + tl.minimum((split + 1) * share, blocks)

    q_main = _columns(q + out_row * D, 0, D_MAIN, D, held)
    if D_REST > 0:
        q_rest = _columns(q + out_row * D, D_MAIN, D_REST, D, held)
    top = tl.full([ROWS], _LOWEST, tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        # A sink is a key that all queries see and whose value is zero: the softmax of the first split starts with it.
        top = tl.where(split == 0, tl.load(sinks + head).to(tl.float32) * _LOG2_E, top)
        weight = tl.where(split == 0, 1.0, weight)
    total = tl.zeros([ROWS, V_MAIN], tl.float32)
    if V_REST > 0:
        total_rest = tl.zeros([ROWS, V_REST], tl.float32)

    for block in range(from_block, to_block):
        key = block * BLOCK + tl.arange(0, BLOCK)
        read = (key >= begin) & (key < end)
        page = _pages(page_rows + (row * COLUMNS - first_page), block, read, PAGE, BLOCK)
        cell = (page.to(tl.int64) * (LAYERS_PER_PAGE * KV_HEADS) + kv_head) * PAGE + layer_index + key % PAGE
        k = _columns(kv + cell * WIDTH, 0, D_MAIN, D, read)
        score = tl.dot(q_main, tl.trans(k), input_precision=PRECISION)
        if D_REST > 0:
            k_rest = _columns(kv + cell * WIDTH, D_MAIN, D_REST, D, read)
            score = tl.dot(q_rest, tl.trans(k_rest), score, input_precision=PRECISION)
        visible = read[None, :] & _visible(key[None, :], position[:, None], WINDOW, CHUNK, PARTS)
        score = tl.where(visible, _scaled(score, SCALE, SOFTCAP), float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        shrink = tl.exp2(top - new_top)
        probability = tl.exp2(score - new_top[:, None])
        weight = weight * shrink + tl.sum(probability, 1)
        top = new_top
        probability = probability.to(kv.dtype.element_ty)
        v = _columns(kv + cell * WIDTH + (WIDTH - V), 0, V_MAIN, V, read)
        total = tl.dot(probability, v, total * shrink[:, None], input_precision=PRECISION)
        if V_REST > 0:
            v_rest = _columns(kv + cell * WIDTH + (WIDTH - V), V_MAIN, V_REST, V, read)
            total_rest = tl.dot(probability, v_rest, total_rest * shrink[:, None], input_precision=PRECISION)

    # A row without visible keys gives zeros, which have no weight beside other splits.
    weight = tl.where(weight > 0, weight, 1.0)
    scale = 1 / weight
    if lse is not None:
        out_row += split.to(tl.int64) * (TOKENS * KV_HEADS * GROUP)
        tl.store(lse + out_row, top + tl.log2(weight), mask=stored)
    _store(out + out_row * V, 0, V, total * scale[:, None], stored)
    if V_REST > 0:
        _store(out + out_row * V, V_MAIN, V, total_rest * scale[:, None], stored)


@triton.jit
@no_type_check
def _first_visible(position: tl.tensor, WINDOW: tl.constexpr, CHUNK: tl.constexpr) -> tl.tensor:
    """Return `AttentionParams.first_visible` of the positions."""
    if CHUNK > 0:
        first = position // CHUNK * CHUNK
        if WINDOW > 0:
            first = tl.maximum(first - WINDOW, 0)
        return first
    if WINDOW > 0:
        return tl.maximum(position - (WINDOW - 1), 0)
    return position * 0


@triton.jit
@no_type_check
def _visible(
    key: tl.tensor, position: tl.tensor, WINDOW: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr
) -> tl.tensor:
    """Return whether the causal order, and window or chunk, let a query see a key."""
    if PARTS > 1:
        key = key * PARTS + (PARTS - 1)  # see `parts.part_of`
    visible = key <= position
    if CHUNK > 0:
        visible &= key >= _first_visible(position, WINDOW, CHUNK)
    elif WINDOW > 0:
        visible &= key > position - WINDOW
    return visible


@triton.jit
@no_type_check
def _pages(pages: tl.tensor, block: tl.tensor, read: tl.tensor, PAGE: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """Return page ids of the block's keys: one for all if pages hold whole blocks; 0 for keys that are not read."""
    if PAGE % BLOCK == 0:  # not an early return: Triton also checks the code after it, in which the shapes differ
        page = tl.load(pages + block * BLOCK // PAGE)
    else:
        page = tl.load(pages + (block * BLOCK + tl.arange(0, BLOCK)) // PAGE, mask=read, other=0)
    return page


@triton.jit
@no_type_check
def _scaled(product: tl.tensor, SCALE: tl.constexpr, SOFTCAP: tl.constexpr) -> tl.tensor:
    """Turn products of queries and keys into exponents of 2."""
    if SOFTCAP > 0:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which is right for x = ±∞ too.
        grown = tl.exp2(product * (2 * SCALE / SOFTCAP * _LOG2_E))
        return (SOFTCAP * _LOG2_E) * (1 - 2 / (grown + 1))
    return product * (SCALE * _LOG2_E)


@triton.jit
@no_type_check
def _columns(
    rows: tl.tensor, FIRST: tl.constexpr, WIDTH: tl.constexpr, LIMIT: tl.constexpr, mask: tl.tensor
) -> tl.tensor:
    """Load columns [FIRST, FIRST + WIDTH) of the rows that begin at the pointers; zeros from LIMIT on and if masked."""
    column = FIRST + tl.arange(0, WIDTH)
    mask = mask[:, None]
    if FIRST + WIDTH > LIMIT:
        mask &= column[None, :] < LIMIT
    return tl.load(rows[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
@no_type_check
def _store(rows: tl.tensor, FIRST: tl.constexpr, LIMIT: tl.constexpr, values: tl.tensor, mask: tl.tensor) -> None:
    """Write the values to columns FIRST, FIRST + 1, ..., below LIMIT, of the rows that begin at the pointers."""
    column = FIRST + tl.arange(0, values.shape[1])
    mask = mask[:, None] & (column[None, :] < LIMIT)
    tl.store(rows[:, None] + column[None, :], values.to(rows.dtype.element_ty), mask=mask)
