"""Attention layers of released models at serving sizes as plain data, for compilation, benchmarks and tuning."""

from dataclasses import dataclass, replace
from typing import Literal

from tools.cases.kernels.attention_fp8 import FP8


@dataclass(frozen=True)
class Layer:
    """A layer at serving size; see `tools.cases.kernels.attention.Case`.

    Attributes:
        sinks: whether there are any.
        context: tokens that a row's page table covers.
        batch: rows.
        count: tokens of each row; 0: one tile.
        implementation: that is compiled, of those for Hopper.
    """

    name: str
    heads: tuple[int, int, int, int]
    page_size: int = 64
    window: int | None = None
    chunk: int | None = None
    sinks: bool = False
    softcap: float | None = None
    row: int = 0
    layers_per_page: int = 1
    tile: int = 1
    dtype: str = "bfloat16"
    kv_dtype: str = ""
    context: int = 131_072
    batch: int = 64
    count: int = 0
    implementation: Literal["mosaic", "mosaic_splits", "mosaic_whole"] = "mosaic"


_GEMMA_3 = Layer("gemma-3-27b local", (32, 16, 128, 128), window=1024, layers_per_page=6)
_GPT_OSS = Layer("gpt-oss-20b local", (64, 8, 64, 64), window=128, sinks=True)
_MIMO = Layer("MiMo-V2-Flash local", (64, 8, 192, 128), window=128, sinks=True, layers_per_page=5)
_GEMMA_4 = Layer("gemma-4-31B full", (32, 4, 512, 512), row=640)
_MISTRAL = Layer("Mistral-7B", (32, 8, 128, 128), window=4096)
DECODE_LAYERS = (
    _GEMMA_3,
    replace(_GEMMA_3, name="gemma-3-27b local, one row", batch=1),
    replace(_GEMMA_3, name="gemma-3-27b full", window=None, layers_per_page=1),
    replace(_GEMMA_3, name="gemma-3-27b full, one row", window=None, layers_per_page=1, batch=1),
    replace(_GEMMA_3, name="gemma-3-27b full, tiles of 8", window=None, layers_per_page=1, tile=8),
    _GPT_OSS,
    replace(_GPT_OSS, name="gpt-oss-20b local, one row", batch=1),
    replace(_GPT_OSS, name="gpt-oss-20b full", window=None),
    replace(_GPT_OSS, name="gpt-oss-20b full, one row", window=None, batch=1),
    _MIMO,
    replace(_MIMO, name="MiMo-V2-Flash full", heads=(64, 4, 192, 128), window=None, sinks=False, layers_per_page=1),
    replace(_GEMMA_4, name="gemma-4-31B local", heads=(32, 16, 256, 256), window=1024, row=0, layers_per_page=5),
    _GEMMA_4,
    replace(_GEMMA_4, name="gemma-4-31B full, page 16", page_size=16),
    replace(_GEMMA_4, name="gemma-4-31B full, one row", batch=1),
    replace(_GEMMA_4, name="512/512 without overlap", row=0),
    Layer("gemma-2-27b local", (32, 16, 128, 128), window=4096, softcap=50.0),
    Layer("Llama-4-Scout local", (40, 8, 128, 128), chunk=8192, layers_per_page=3),
    Layer("Llama-3.1-8B", (32, 8, 128, 128), context=8192, batch=32),
    _MISTRAL,
    *(replace(_MISTRAL, name=f"Mistral-7B, page {page}", page_size=page) for page in (16, 32, 128)),
    replace(_MISTRAL, name="Mistral-7B, float16", dtype="float16"),
    Layer("phi-3-mini (96/96)", (32, 32, 96, 96), window=2047),
    Layer("80/80, softcap, sinks, page 16", (16, 4, 80, 80), 16, softcap=30.0, sinks=True),
)
_PROMPT = 8_192  # tokens
_LOCAL_SCOUT = next(layer for layer in DECODE_LAYERS if layer.name == "Llama-4-Scout local")
_FULL_MIMO = next(layer for layer in DECODE_LAYERS if layer.name == "MiMo-V2-Flash full")
PREFILL_LAYERS = tuple(
    replace(layer, name=f"prefill, {layer.name}", batch=1, count=_PROMPT, tile=128 * layer.heads[1] // layer.heads[0])
    for layer in (
        _GEMMA_3,
        replace(_GEMMA_3, name="gemma-3-27b full", window=None, layers_per_page=1),
        _GPT_OSS,
        replace(_GPT_OSS, name="gpt-oss-20b full", window=None),
        _MIMO,
        _FULL_MIMO,
        replace(_GEMMA_4, name="gemma-4-31B local", heads=(32, 16, 256, 256), window=1024, row=0, layers_per_page=5),
        _GEMMA_4,
        replace(_GEMMA_4, name="512/512 without overlap", row=0),
        _LOCAL_SCOUT,
        _MISTRAL,
        *(replace(_MISTRAL, name=f"Mistral-7B, page {page}", page_size=page) for page in (16, 32, 128)),
        replace(_MISTRAL, name="Mistral-7B, float16", dtype="float16"),
        Layer("gemma-2-27b local", (32, 16, 128, 128), window=4096, softcap=50.0),
        Layer("phi-3-mini (96/96)", (32, 32, 96, 96), window=2047),
        Layer("80/80, softcap, sinks, page 16", (16, 4, 80, 80), 16, softcap=30.0, sinks=True),
    )
)
# A short prompt after a long prefix, which needs splits.
PREFILL_LAYERS += (replace(PREFILL_LAYERS[1], name="prefill, gemma-3-27b full, 64 tokens", count=64),)
_FP8_NAMES = (
    "gemma-3-27b local",
    "gemma-3-27b full",
    "gemma-3-27b full, one row",
    "gpt-oss-20b local",
    "gpt-oss-20b full",
    "MiMo-V2-Flash local",
    "gemma-4-31B local",
    "gemma-4-31B full",
    "Mistral-7B, page 16",
)
FP8_LAYERS = tuple(
    replace(layer, name=f"fp8, {layer.name}", kv_dtype=FP8)
    for layer in (*DECODE_LAYERS, *PREFILL_LAYERS)
    if layer.name.removeprefix("prefill, ") in _FP8_NAMES
)
LAYERS = (*DECODE_LAYERS, *PREFILL_LAYERS, *FP8_LAYERS)
_SPLIT_NAMES = (
    *("gpt-oss-20b full", "gpt-oss-20b full, one row", "gemma-3-27b full", "gemma-3-27b full, tiles of 8"),
    *("MiMo-V2-Flash full", "Llama-4-Scout local", "80/80, softcap, sinks, page 16", "gemma-4-31B full"),
    *("512/512 without overlap", "gemma-3-27b local, one row", "fp8, gemma-3-27b full", "fp8, gemma-4-31B full"),
)
_SPLIT_PREFILL_NAMES = (
    *("prefill, gemma-3-27b full", "prefill, gpt-oss-20b full", "prefill, MiMo-V2-Flash full"),
    *("prefill, gemma-4-31B full", "fp8, prefill, gemma-3-27b full", "fp8, prefill, gemma-4-31B full"),
)
SPLIT_LAYERS = tuple(
    replace(layer, name=f"splits, {layer.name}", implementation="mosaic_splits")
    for layer in LAYERS
    if layer.name in (*_SPLIT_NAMES, *_SPLIT_PREFILL_NAMES)
)
# Keys that are not split, in blocks of those of one query: the same kernels as else for decode steps.
WHOLE_LAYERS = tuple(
    replace(layer, name=f"whole, {layer.name}", implementation="mosaic_whole")
    for layer in PREFILL_LAYERS
    if layer.name.removeprefix("prefill, ")
    in ("gemma-3-27b local", "gemma-3-27b full", "gpt-oss-20b full", "Mistral-7B")
)
