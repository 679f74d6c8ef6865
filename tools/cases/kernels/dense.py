"""Cases of products of linear layers on Hopper, as plain data, for tests and compilation.

`CASES` are small, and the kernel must be right on each. `MATRICES` (in integers of 4 bits), `NVFP4_MATRICES` and
`BLOCK_MATRICES` (in e4m3 with scales of blocks) are those of released models, to be compiled with `TOKENS` per step.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from pallas_kernels.experts.glu import Glu

# As in `tools.cases.kernels.experts`. "rows" has the outputs first; "head" too, and results in float32.
Form = Literal["int4", "int4_wide", "int8", "fp8", "fp8_blocks", "nvfp4", "plain", "rows", "head"]
SILU, GELU = Glu("silu"), Glu("gelu_tanh")


@dataclass(frozen=True)
class Case:
    """One product.

    Attributes:
        groups: of inputs that share a scale, of weights of 4 bits. A block of "fp8_blocks" has 128 inputs and outputs.
        quick: fast enough to be interpreted in every run of the tests.
    """

    name: str
    tokens: int
    inputs: int
    outputs: int
    form: Form = "int4"
    groups: int = 1
    gated: Glu | None = None
    quick: bool = True


CASES = (
    Case("one token", 1, 128, 64),
    Case("tokens that are no eights", 13, 192, 128, groups=3),
    Case("groups of 32 inputs", 8, 128, 128, groups=4),
    Case("scales in float16", 8, 128, 64, "int4_wide", groups=2),
    Case("gates and ups", 24, 128, 256, groups=2, gated=SILU),
    Case("int8", 9, 128, 128, "int8"),
    Case("fp8, gates and ups", 16, 128, 128, "fp8", gated=GELU),
    Case("fp8 in blocks", 9, 256, 128, "fp8_blocks"),
    Case("fp8 in blocks, gates and ups, two tiles of tokens", 72, 128, 256, "fp8_blocks", gated=SILU),
    Case("nvfp4", 13, 192, 128, "nvfp4"),
    Case("nvfp4, gates and ups", 24, 128, 256, "nvfp4", gated=SILU),
    Case("two tiles of tokens", 136, 64, 128, groups=2),
    Case("16 bits", 13, 192, 192, "plain"),
    Case("16 bits, gates and ups", 24, 128, 256, "plain", gated=SILU),
    Case("16 bits, outputs first", 8, 128, 128, "rows"),
    Case("16 bits, outputs first, float32", 136, 128, 192, "head"),
    Case("more outputs than a thread block", 8, 128, 448, groups=2, quick=False),
    Case("two and a half tiles of tokens, gates and ups", 320, 128, 384, groups=4, gated=GELU, quick=False),
    Case("int8, two tiles of tokens", 200, 128, 192, "int8", quick=False),
    Case("fp8, one token", 1, 256, 320, "fp8", quick=False),
    Case("fp8 in blocks, two tiles of tokens", 200, 256, 384, "fp8_blocks", quick=False),
    Case("fp8 in blocks, one block", 1, 128, 128, "fp8_blocks", quick=False),
)


class Matrix(NamedTuple):
    """A linear layer of a released model.

    Attributes:
        form: "int4", "nvfp4", "plain", "router" or "head". The last two have results in float32, and the last one is an
            embedding: its outputs come first.
    """

    model: str
    layer: str
    inputs: int
    outputs: int
    gated: Glu | None = None
    form: Literal["int4", "nvfp4", "plain", "router", "head"] = "int4"

    @property
    def name(self) -> str:
        """Model and layer."""
        return f"{self.model} {self.layer}" + {"int4": "", "nvfp4": ", nvfp4"}.get(self.form, ", 16 bits")


MATRICES = (
    Matrix("Llama-4-Scout", "qkv", 5120, 7168),
    Matrix("Llama-4-Scout", "out", 5120, 5120),
    Matrix("Llama-4-Scout", "shared gate_up", 5120, 16384, SILU),
    Matrix("Llama-4-Scout", "shared down", 8192, 5120),
    Matrix("gemma-3-27b", "qkv", 5376, 8192),
    Matrix("gemma-3-27b", "out", 4096, 5376),
    Matrix("gemma-3-27b", "gate_up", 5376, 43008, GELU),
    Matrix("gemma-3-27b", "down", 21504, 5376),
)
BLOCK_MATRICES = (
    Matrix("MiMo-V2-Flash, fp8 in blocks,", "qkv", 4096, 14848),
    Matrix("MiMo-V2-Flash, fp8 in blocks,", "gate_up", 4096, 32768, SILU),
    Matrix("MiMo-V2-Flash, fp8 in blocks,", "down", 16384, 4096),
)
NVFP4_MATRICES = tuple(matrix._replace(form="nvfp4") for matrix in MATRICES if matrix.model == "gemma-3-27b")
PLAIN_MATRICES = (
    *(matrix._replace(form="plain") for matrix in MATRICES if matrix.model == "gemma-3-27b"),
    Matrix("gemma-3-27b", "head", 5376, 262208, form="head"),
    Matrix("gpt-oss-20b", "qkv", 2880, 5120, form="plain"),
    Matrix("gpt-oss-20b", "router", 2880, 64, form="router"),
    Matrix("gpt-oss-20b", "head", 2880, 201088, form="router"),
    Matrix("Mistral-7B", "gate_up", 4096, 28672, SILU, "plain"),
)
PLAIN_TOKENS = (8, 64, 128, 256, 2048)
TOKENS = (1, 16, 32, 64, 128, 256, 512)
