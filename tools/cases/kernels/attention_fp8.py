"""Cases of paged attention over pages of 8 bits, with and without scales; see `tools.cases.kernels.attention`."""

from tools.cases.kernels.attention import EXTEND, FEW, RAGGED, SHORT, SINKS, Case

FP8 = "float8_e4m3fn"

FP8_CASES = (
    Case("fp8 pages, full p4, float32, scales", RAGGED, 48, 4, kv_dtype=FP8, kv_scales=((0.5, 2.0), (3.0, 0.01))),
    Case(
        "fp8 pages, 64/64 p16, window 64, sinks, scales",
        (SHORT,),
        5,
        16,
        window=64,
        heads=(8, 2, 64, 64),
        sinks=SINKS * 2,
        layers_per_page=2,
        layer_index=1,
        tile=1,
        dtype="bfloat16",
        kv_dtype=FP8,
        kv_scales=((0.3, 1.0), (2.0, 0.7)),
        quick=True,
    ),
    Case(
        "fp8 pages, prefill, 128/128 p64, full, scales",
        (EXTEND[:2],),
        52,
        64,
        heads=(2, 1, 128, 128),
        tile=64,
        dtype="bfloat16",
        kv_dtype=FP8,
        kv_scales=((0.3,), (1.5,)),
        quick=True,
    ),
    Case(
        "fp8 pages, prefill, 512/512 of 640 p32, chunk 128, scales",
        (EXTEND[1:],),
        14,
        32,
        chunk=128,
        heads=(4, 1, 512, 512),
        row=640,
        tile=16,
        dtype="bfloat16",
        kv_dtype=FP8,
        kv_scales=((0.3,), (1.5,)),
    ),
    Case(
        "fp8 pages, 192/128 p128, window 70, splits",
        (FEW,),
        24,
        128,
        window=70,
        heads=(16, 1, 192, 128),
        tile=4,
        dtype="float16",
        kv_dtype=FP8,
    ),
)
