"""Small cases of paged attention as plain data. Each implementation that serves a case must be right on it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RowSpec:
    """A row of a step: positions [start, start + count), which see no position before `visible_from`."""

    start: int
    count: int
    visible_from: int = 0

    @property
    def end(self) -> int:
        """One past the row's last position."""
        return self.start + self.count


@dataclass(frozen=True)
class Case:
    """The static shapes of a call, and several sets of rows for it, so that each shape compiles once.

    Attributes:
        rows: sets of rows; each set is one step.
        tokens: tokens of a step, padding included.
        page_size, window, chunk, lookback, softcap, layers_per_page, layer_index: see `paged_attention`.
        sinks: one per query head.
        heads: query heads, KV heads, head size D, value size.
        row: numbers of a token in a page. 0: D + value size. If it is less than that, K and V overlap.
        tile: query tokens per tile.
        page_columns: width of the page tables; 0: as wide as the longest row needs.
        pages_cut: page tables begin at the page of the first visible position, as those of local layers do in a step.
        dtype: type of the queries.
        kv_dtype: type of the pages; empty: as the queries.
        kv_scales: scales of 8-bit pages, for K and V by KV head.
        parts: devices that share the keys, each with `page_size` / `parts` cells of a page.
        quick: fast enough to be interpreted in every run of the tests.
    """

    name: str
    rows: tuple[tuple[RowSpec, ...], ...]
    tokens: int
    page_size: int
    window: int | None = None
    chunk: int | None = None
    lookback: int = 0
    sinks: tuple[float, ...] | None = None
    heads: tuple[int, int, int, int] = (4, 2, 8, 8)
    row: int = 0
    softcap: float | None = None
    layers_per_page: int = 1
    layer_index: int = 0
    tile: int = 32
    page_columns: int = 0
    pages_cut: bool = False
    dtype: str = "float32"
    kv_dtype: str = ""
    kv_scales: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    parts: int = 1
    quick: bool = False

    @property
    def width(self) -> int:
        """Columns of the page tables."""
        return self.page_columns or max(-(-row.end // self.page_size) for rows in self.rows for row in rows) + 1

    @property
    def for_mosaic(self) -> bool:
        """Whether the Hopper kernels serve the case."""
        heads, kv_heads, head_dim, v_dim = self.heads
        fits = heads // kv_heads <= 64 and (self.row or head_dim + v_dim) % (32 if self.kv_dtype else 16) == 0
        return fits and self.dtype != "float32" and self.page_size // self.parts in (8, 16, 32, 64, 128)


PREFILL = (RowSpec(0, 37), RowSpec(0, 1), RowSpec(0, 10))
CHUNKS = (RowSpec(130, 20), RowSpec(5, 7), RowSpec(31, 1), RowSpec(64, 16))
ONES = (RowSpec(200, 1), RowSpec(0, 1), RowSpec(127, 1), RowSpec(128, 1))
MIXED = (RowSpec(299, 1), RowSpec(3, 33), RowSpec(0, 1), RowSpec(255, 13))
PADDED = (RowSpec(17, 1), RowSpec(40, 9), RowSpec(0, 0), RowSpec(0, 0))
LONG = (RowSpec(460, 40), RowSpec(383, 1), RowSpec(0, 1), RowSpec(511, 2))
FROM = (RowSpec(130, 20, 125), RowSpec(40, 6, 3), RowSpec(64, 1, 64), RowSpec(0, 3))
# For chunks of 4 and 8: rows that end or begin at a boundary, lie in one chunk, cross many, or see a single key.
EDGES = (RowSpec(124, 8), RowSpec(3, 2), RowSpec(8, 1), RowSpec(16, 16))
LATE = (RowSpec(259, 3), RowSpec(120, 23), RowSpec(390, 2), RowSpec(129, 1))  # around 130, 260 and 390
SHORT = (RowSpec(0, 1), RowSpec(62, 1), RowSpec(64, 1), RowSpec(199, 1), RowSpec(0, 0))
LONG_DECODE = (RowSpec(511, 1), RowSpec(65, 1), RowSpec(0, 0))
FEW = (RowSpec(192, 8), RowSpec(57, 9), RowSpec(0, 3))
FROM_FEW = (RowSpec(250, 8, 200), RowSpec(0, 1), RowSpec(127, 8, 127))
EXTEND = (RowSpec(192, 40), RowSpec(57, 9), RowSpec(0, 3), RowSpec(0, 0))
# To pages, blocks and tiles, except for the last row.
ALIGNED = (RowSpec(64, 64), RowSpec(0, 0), RowSpec(128, 1), RowSpec(0, 63))
LONG_EXTEND = (RowSpec(30, 150), RowSpec(0, 0), RowSpec(300, 20, 290))
LONG_AMONG_SHORT = (RowSpec(1_499, 1), RowSpec(0, 1), RowSpec(70, 1), RowSpec(0, 0), RowSpec(129, 1))
LONG_BESIDE_PROMPT = (RowSpec(1_499, 1), RowSpec(30, 17), RowSpec(129, 1))
LONG_PROMPT = (RowSpec(70, 9), RowSpec(1_499, 1), RowSpec(4_200, 9))
SINKS = (0.5, -1.0, 3.0, 0.0)
FAR_SINKS = (90.0, -90.0, 1e4, -1e4)
RAGGED_DECODE, RAGGED_STEP = "16 bits, ragged, decode", "16 bits, ragged, beside a prompt"
RAGGED_PROMPT = "16 bits, ragged, a prompt of a long row"
RAGGED = (PREFILL, CHUNKS, MIXED, PADDED)

CASES = (
    Case("full p4", (*RAGGED, ONES), 48, 4),
    Case("full p1, groups of 4, one KV head, tiles of one", RAGGED, 48, 1, heads=(4, 1, 8, 8), tile=1),
    Case("full p16, no groups, many blocks, tiles of 7", (*RAGGED, LONG), 48, 16, heads=(2, 2, 8, 8), tile=7),
    Case("full p128, softcap, value size 4 of 12", (*RAGGED, LONG), 48, 128, heads=(4, 2, 12, 4), softcap=3.0),
    Case("full p48, blocks of 96 tokens, first visible", (FROM, *RAGGED, LONG), 48, 48),
    Case("full p200, pages longer than a block", (*RAGGED, LONG), 48, 200),
    Case("window 1, p4", RAGGED, 48, 4, window=1),
    Case("window 3, p1", RAGGED, 48, 1, window=3),
    Case("window 4 = p, layer_index 2 of 3", RAGGED, 48, 4, window=4, layers_per_page=3, layer_index=2),
    Case("window 5 = p + 1, value size 16 of 8", RAGGED, 48, 4, window=5, heads=(4, 4, 8, 16)),
    Case("window 47 = 3p - 1, softcap", (*RAGGED, LONG), 48, 16, window=47, softcap=2.0, heads=(8, 2, 8, 8)),
    Case("window 130, p64, over three blocks", (LONG, MIXED), 48, 64, window=130),
    Case("window 1000, longer than the context, bfloat16", RAGGED, 48, 16, window=1000, dtype="bfloat16"),
    Case("window 8, cut page rows, p16", (*RAGGED, LONG), 48, 16, window=8, pages_cut=True, page_columns=5),
    Case("window 20, cut page rows, p3, first visible", (FROM, MIXED), 48, 3, window=20, pages_cut=True),
    Case("chunk 4 = p", (*RAGGED, EDGES), 48, 4, chunk=4),
    Case("chunk 4, p16, softcap, tiles of 7", (*RAGGED, EDGES, LONG), 48, 16, chunk=4, softcap=2.0, tile=7),
    Case("chunk 8, cut page rows, p4", (*RAGGED, EDGES, LONG), 48, 4, chunk=8, pages_cut=True),
    Case("chunk 8, cut page rows, p1, first visible", (FROM, MIXED, EDGES), 48, 1, chunk=8, pages_cut=True),
    Case("chunk 130, p10, over blocks", (LONG, MIXED, LATE), 48, 10, chunk=130),
    Case("chunk 130, cut page rows, p65", (LONG, MIXED, LATE), 48, 65, chunk=130, pages_cut=True),
    Case("chunk 1000, longer than the context, bfloat16", RAGGED, 48, 16, chunk=1000, dtype="bfloat16"),
    Case("sinks, full, p16", (*RAGGED, LONG), 48, 16, sinks=SINKS),
    Case("sinks, full, p4, far, softcap, bfloat16", RAGGED, 48, 4, sinks=FAR_SINKS, softcap=3.0, dtype="bfloat16"),
    Case("sinks, far, window 1: a row with one key", RAGGED, 48, 4, window=1, sinks=FAR_SINKS),
    Case("sinks, window 130, p64, no groups", (LONG, MIXED), 48, 64, window=130, sinks=FAR_SINKS, heads=(4, 4, 8, 6)),
    Case(
        "sinks, window 8, cut page rows, one KV head",
        RAGGED,
        48,
        4,
        window=8,
        pages_cut=True,
        sinks=SINKS,
        heads=(4, 1, 8, 8),
    ),
    Case("sinks, chunk 8, cut page rows, p8", (*RAGGED, EDGES), 48, 8, chunk=8, pages_cut=True, sinks=FAR_SINKS),
    Case(
        "decode, chunk 4, sinks, cut page rows",
        (ONES,),
        4,
        4,
        chunk=4,
        sinks=SINKS,
        tile=1,
        pages_cut=True,
        page_columns=2,
    ),
    Case("decode, window 5, cut page rows", (ONES,), 4, 4, window=5, tile=1, pages_cut=True, page_columns=2),
    Case(
        "decode, full, two of four rows",
        (ONES, (RowSpec(77, 1), RowSpec(1, 1), RowSpec(0, 0), RowSpec(0, 0))),
        4,
        4,
        tile=1,
    ),
    # Cases that the Hopper kernels serve: 16-bit types, and sizes that WGMMA takes.
    Case(
        "16 bits, 64/64 p16, window 64, sinks",
        (SHORT,),
        5,
        16,
        window=64,
        heads=(8, 2, 64, 64),
        sinks=SINKS * 2,
        layers_per_page=3,
        layer_index=2,
        tile=1,
        dtype="bfloat16",
        quick=True,
    ),
    Case(
        "16 bits, 128/128 p64, full, softcap, splits",
        (LONG_DECODE,),
        3,
        64,
        heads=(4, 1, 128, 128),
        softcap=5.0,
        tile=1,
        page_columns=9,
        dtype="bfloat16",
        quick=True,
    ),
    Case(
        "16 bits, 192/128 p128, window 128, group of 16, cut",
        (SHORT,),
        5,
        128,
        window=128,
        heads=(16, 1, 192, 128),
        sinks=SINKS * 4,
        tile=1,
        pages_cut=True,
        page_columns=3,
        dtype="bfloat16",
        quick=True,
    ),
    Case(
        "16 bits, 256/256 p32, chunk 64, group of 5",
        (SHORT,),
        5,
        32,
        chunk=64,
        heads=(5, 1, 256, 256),
        tile=1,
        dtype="float16",
        quick=True,
    ),
    Case(
        "16 bits, 512/512 of 640 p64, full",
        (SHORT[2:],),
        3,
        64,
        heads=(8, 1, 512, 512),
        row=640,
        tile=1,
        dtype="bfloat16",
        quick=True,
    ),
    Case(
        "16 bits, 80/80 p8, window 20, no groups",
        (SHORT,),
        5,
        8,
        window=20,
        heads=(2, 2, 80, 80),
        tile=1,
        pages_cut=True,
        dtype="float16",
        quick=True,
    ),
    Case(
        "16 bits, tiles of 8, window 70, sinks",
        (FEW,),
        24,
        64,
        window=70,
        heads=(4, 1, 64, 64),
        sinks=SINKS,
        tile=8,
        dtype="bfloat16",
        quick=True,
    ),
    Case(
        "16 bits, tiles of 8, chunk 128, first visible",
        (FEW, FROM_FEW),
        24,
        16,
        chunk=128,
        heads=(8, 1, 64, 64),
        tile=8,
        dtype="bfloat16",
    ),
    Case("16 bits, 32/96 p16, full", (SHORT,), 5, 16, heads=(4, 2, 32, 96), tile=1, dtype="bfloat16"),
    Case(
        "16 bits, 512/512 p16, sinks, softcap, splits",
        (SHORT[2:],),
        3,
        16,
        heads=(8, 1, 512, 512),
        sinks=FAR_SINKS * 2,
        softcap=9.0,
        tile=1,
        page_columns=40,
        dtype="bfloat16",
    ),
    # Prefill: tiles that fill a thread block with 64 or 128 rows (tokens times heads of a group).
    Case(
        "16 bits, prefill, 128/128 p64, full, no groups",
        (LONG_EXTEND,),
        172,
        64,
        heads=(1, 1, 128, 128),
        tile=128,
        dtype="bfloat16",
        quick=True,
    ),
    Case(
        "16 bits, prefill, 64/64 p16, window 70, sinks, cut",
        (EXTEND,),
        60,
        16,
        window=70,
        heads=(8, 2, 64, 64),
        sinks=SINKS * 2,
        layers_per_page=3,
        layer_index=1,
        tile=32,
        pages_cut=True,
        page_columns=9,
        dtype="bfloat16",
        quick=True,
    ),
    Case(
        "16 bits, prefill, 192/128 p32, chunk 64, group of 5",
        (EXTEND,),
        60,
        32,
        chunk=64,
        heads=(5, 1, 192, 128),
        tile=25,
        page_columns=16,
        dtype="float16",
        quick=True,
    ),
    Case(
        "16 bits, prefill, 256/256 p128, softcap, splits",
        (EXTEND[:2],),
        52,
        128,
        heads=(2, 1, 256, 256),
        softcap=5.0,
        tile=64,
        page_columns=4,
        dtype="bfloat16",
        quick=True,
    ),
    Case(
        "16 bits, prefill, 512/512 of 640 p64, full",
        (EXTEND[1:],),
        14,
        64,
        heads=(8, 1, 512, 512),
        row=640,
        tile=16,
        dtype="bfloat16",
        quick=True,
    ),
    Case(
        "16 bits, prefill, 80/80 p8, window 300, sinks, softcap",
        (LONG_EXTEND, ALIGNED),
        172,
        8,
        window=300,
        heads=(2, 1, 80, 80),
        sinks=FAR_SINKS[:2],
        softcap=3.0,
        tile=64,
        dtype="float16",
    ),
    Case(
        "16 bits, prefill, 64/64 p64, chunk 400, first visible, group of 16",
        (LONG_EXTEND, ALIGNED),
        172,
        64,
        chunk=400,
        heads=(16, 1, 64, 64),
        tile=8,
        dtype="bfloat16",
    ),
    Case(
        "16 bits, prefill, 96/96 p16, full, group of 6, tiles of 32",
        (LONG_EXTEND, ALIGNED),
        172,
        16,
        heads=(6, 1, 96, 96),
        tile=32,
        dtype="bfloat16",
    ),
    # Rows of very different lengths: splits of "mosaic_splits" are of 1,024 keys, those of prompts of 4,096.
    Case(
        RAGGED_DECODE,
        (LONG_AMONG_SHORT,),
        5,
        64,
        heads=(4, 1, 64, 64),
        sinks=SINKS,
        tile=1,
        page_columns=33,
        dtype="bfloat16",
    ),
    Case(
        RAGGED_STEP,
        (LONG_BESIDE_PROMPT,),
        20,
        64,
        heads=(4, 1, 64, 64),
        sinks=SINKS,
        tile=17,
        page_columns=33,
        dtype="bfloat16",
    ),
    Case(
        RAGGED_PROMPT,
        (LONG_PROMPT,),
        20,
        64,
        heads=(4, 1, 64, 64),
        sinks=SINKS,
        tile=17,
        page_columns=257,
        dtype="bfloat16",
    ),
)
