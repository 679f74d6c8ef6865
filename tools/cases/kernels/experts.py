"""Cases of `grouped_matmul` as plain data, for tests, compilation, benchmarks and tuning.

`CASES` are small, and each implementation that serves a case must be right on it. `LAYERS` are mixtures of experts of
released models, to be compiled and measured with `DECODE_TOKENS` and `PREFILL_TOKENS` per step.
"""

from dataclasses import dataclass, replace
from typing import Literal

from pallas_kernels.experts.api import Implementation
from pallas_kernels.experts.glu import Glu

Form = Literal["plain", "mxfp4", "int8", "fp8", "fp8_blocks", "int4", "int4_wide", "nvfp4"]  # of weights
# fp8_blocks: with a scale for 128 inputs of 128 outputs.
# int4: integers in groups of 32, with scales in bfloat16; int4_wide: in float16.
_BITS: dict[Form, float] = {
    "plain": 16,
    "mxfp4": 4.25,
    "int8": 8,
    "fp8": 8,
    "fp8_blocks": 8,
    "int4": 4.75,
    "int4_wide": 5.25,
    "nvfp4": 4.5,
}  # with scales of inputs


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        sizes: rows of each expert.
        spare: rows at the end that belong to no expert.
        quick: fast enough to be interpreted in every run of the tests.
    """

    name: str
    sizes: tuple[int, ...]
    inputs: int = 64
    outputs: int = 64
    gated: Glu | None = None
    bias: bool = False
    spare: int = 0
    dtype: str = "float32"
    form: Form = "plain"
    quick: bool = True

    @property
    def for_mosaic(self) -> bool:
        """Whether the Hopper kernels serve the case."""
        return self.dtype != "float32" and self.inputs % 64 == 0

    def served_by(self, implementation: str) -> bool:
        """Whether an implementation of `grouped_matmul` serves the case."""
        if implementation == "mosaic_overlap":
            return self.for_mosaic and self.form != "plain"
        if implementation == "cpu" and self.form == "fp8_blocks":
            return False
        if implementation == "triton":
            return self.form == "plain"
        return implementation != "mosaic" or self.for_mosaic


@dataclass(frozen=True)
class Layer:
    """A mixture of experts of width `hidden`, of which each token chooses `top_k`.

    Attributes:
        overlap: weights in MXFP4 are unpacked while the product before runs, "mosaic_overlap"; those of 8 bits always.
        cluster: thread blocks that copy rows for each other; see `hopper.launch.Tuning`.
        shared: two thread blocks share a multiprocessor; see there.
    """

    name: str
    experts: int
    top_k: int
    d_model: int
    hidden: int
    gated: Glu
    bias: bool = False
    form: Form = "plain"
    overlap: bool = False
    cluster: int = 1
    shared: bool = False

    @property
    def implementation(self) -> Implementation:
        """The implementation that is compiled and measured."""
        return "mosaic_overlap" if self.overlap else "mosaic"

    def weight_bytes(self, experts: float) -> float:
        """Return the bytes of the matrices of that many experts, but for scales of outputs."""
        return experts * 3 * self.d_model * self.hidden * self.bits / 8

    @property
    def bits(self) -> float:
        """Bits of a number."""
        return _BITS[self.form]


SILU, GPT_OSS_GLU = Glu("silu"), Glu("silu", clamp=7.0, alpha=1.702)
EDGES = (0, 1, 7, 8, 9, 63, 64, 65, 130, 0)
CASES = (
    Case("no rows", (0, 0, 0), spare=8),
    Case("one row", (0, 1, 0)),
    Case("edges", EDGES, inputs=24, outputs=40, spare=16),
    Case("edges, biases", EDGES, inputs=24, outputs=40, bias=True),
    Case("silu", (3, 0, 17), gated=SILU),
    Case("gelu, biases", (3, 0, 17), gated=Glu("gelu"), bias=True),
    Case("gelu_tanh, clamp", (3, 0, 17), gated=Glu("gelu_tanh", clamp=0.5)),
    Case("relu", (3, 0, 17), gated=Glu("relu")),
    Case("gpt-oss's activation, biases", (3, 0, 17), gated=Glu("silu", clamp=0.7, alpha=1.702), bias=True),
    Case("4 bits, biases, gpt-oss", (3, 0, 17), 96, 40, GPT_OSS_GLU, bias=True, form="mxfp4"),
    Case("16 bits, no rows", (0, 0), 64, 64, spare=8, dtype="bfloat16"),
    Case("16 bits, one row", (0, 1, 0), 192, 128, SILU, dtype="bfloat16"),
    Case("16 bits, edges", EDGES, 128, 192, spare=16, dtype="bfloat16"),
    Case("16 bits, edges, biases, gpt-oss", EDGES, 64, 192, GPT_OSS_GLU, bias=True, dtype="bfloat16", quick=False),
    Case("float16, eights, gelu", (8, 8, 0, 1, 2, 8), 64, 128, Glu("gelu"), dtype="float16"),
    Case("float16, gelu_tanh, clamp", (5, 3), 64, 64, Glu("gelu_tanh", clamp=0.5), dtype="float16", quick=False),
    Case("16 bits, relu", (5, 3), 64, 64, Glu("relu"), dtype="bfloat16", quick=False),
    Case("4 bits, tiles", (3, 0, 17), 192, 128, dtype="bfloat16", form="mxfp4"),
    Case("4 bits, tiles, biases, gpt-oss", (9, 0, 1), 128, 192, GPT_OSS_GLU, True, dtype="bfloat16", form="mxfp4"),
    Case("4 bits, edges", EDGES, 64, 128, SILU, dtype="bfloat16", form="mxfp4", quick=False),
    Case("4 bits, one product a turn", (9, 40), 64, 64, bias=True, dtype="bfloat16", form="mxfp4", quick=False),
    Case("int8, biases, gpt-oss", (9, 0, 1), 192, 128, GPT_OSS_GLU, True, dtype="bfloat16", form="int8"),
    Case("fp8, silu", (3, 0, 17), 128, 192, SILU, dtype="bfloat16", form="fp8"),
    Case("fp8 in blocks, silu", (3, 0, 17), 256, 192, SILU, dtype="bfloat16", form="fp8_blocks"),
    Case("fp8 in blocks, one block", (1, 9), 128, 128, bias=True, dtype="bfloat16", form="fp8_blocks"),
    Case("fp8 in blocks, float32", (3, 0, 17), 96, 40, SILU, form="fp8_blocks"),
    Case("int8, edges", EDGES, 64, 128, spare=16, dtype="bfloat16", form="int8", quick=False),
    Case("fp8, edges, biases", EDGES, 128, 128, bias=True, dtype="bfloat16", form="fp8", quick=False),
    Case("fp8 in blocks, edges", EDGES, 256, 128, GPT_OSS_GLU, True, 8, "bfloat16", "fp8_blocks", quick=False),
    Case("int4, biases, gpt-oss", (9, 0, 1), 192, 128, GPT_OSS_GLU, True, dtype="bfloat16", form="int4"),
    Case("int4 of float16", (3, 0, 17), 64, 128, bias=True, dtype="bfloat16", form="int4_wide"),
    Case("int4, edges", EDGES, 128, 128, SILU, spare=8, dtype="bfloat16", form="int4", quick=False),
    Case("nvfp4, biases, gpt-oss", (9, 0, 1), 192, 128, GPT_OSS_GLU, True, dtype="bfloat16", form="nvfp4"),
    Case("nvfp4, float32, silu", (3, 0, 17), 48, 40, SILU, form="nvfp4"),
    Case("nvfp4, edges", EDGES, 128, 128, SILU, spare=8, dtype="bfloat16", form="nvfp4", quick=False),
    Case("16 bits, one expert, many rows", (300,), 128, 448, bias=True, dtype="bfloat16", quick=False),
)

_GPT_OSS = Layer("gpt-oss-20b", 32, 4, 2880, 2880, GPT_OSS_GLU, bias=True)
LAYERS = (
    _GPT_OSS,
    replace(_GPT_OSS, name="gpt-oss-20b, 4 bits", form="mxfp4"),
    replace(_GPT_OSS, name="gpt-oss-120b", experts=128),
    replace(_GPT_OSS, name="gpt-oss-120b, 4 bits", experts=128, form="mxfp4"),
    Layer("MiMo-V2-Flash", 256, 8, 4096, 2048, SILU),
    Layer("Llama-4-Scout", 16, 1, 5120, 8192, SILU),
    *(
        replace(_GPT_OSS, name=f"gpt-oss-{size}, 4 bits, overlap", experts=count, form="mxfp4", overlap=True)
        for size, count in (("20b", 32), ("120b", 128))
    ),
    Layer("MiMo-V2-Flash, fp8", 256, 8, 4096, 2048, SILU, form="fp8"),
    Layer("MiMo-V2-Flash, fp8 in blocks", 256, 8, 4096, 2048, SILU, form="fp8_blocks"),
    Layer("Llama-4-Scout, int8", 16, 1, 5120, 8192, SILU, form="int8"),
    Layer("Llama-4-Scout, int4", 16, 1, 5120, 8192, SILU, form="int4"),
    Layer("Llama-4-Scout, int4 of float16", 16, 1, 5120, 8192, SILU, form="int4_wide"),
    Layer("gemma-4-26B-A4B, int4", 128, 8, 2816, 704, Glu("gelu_tanh"), form="int4"),
    Layer("Llama-4-Scout, nvfp4", 16, 1, 5120, 8192, SILU, form="nvfp4"),
    Layer("gemma-4-26B-A4B, nvfp4", 128, 8, 2816, 704, Glu("gelu_tanh"), form="nvfp4"),
)
# With copies of rows for two thread blocks, which no default has: compiled with `CLUSTER_TOKENS` alone.
CLUSTERED = tuple(replace(layer, name=f"{layer.name}, clusters", cluster=2) for layer in LAYERS[6:8])
CLUSTER_TOKENS = (128, 256, 384)
# With two thread blocks on a multiprocessor, which no default has: compiled with `SHARED_TOKENS` alone.
SHARED = tuple(replace(layer, name=f"{layer.name}, shared", shared=True) for layer in LAYERS[6:8])
SHARED_TOKENS = (1, 16, 64)
MIDDLE_TOKENS = (96, 128, 384)  # between a decode step of few rows and a prefill, for the kernel that overlaps
DECODE_TOKENS, PREFILL_TOKENS = (1, 16, 64, 256), (2048, 8192)
# For the kernel on Triton: a mixture of gpt-oss held in 16 bits, many small experts, and few large ones.
TRITON_LAYERS = tuple(layer for layer in LAYERS if layer.name in ("gpt-oss-20b", "MiMo-V2-Flash", "Llama-4-Scout"))
TRITON_TOKENS = (1, 64, 256, 2048)
TRITON_GPUS = ("a100", "l4", "h200", "b200")  # files in pallas_kernels/tuning
