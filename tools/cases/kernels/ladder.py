"""The ladder: checks of a GPU from the simplest kernel to a whole step, as plain data.

On a GPU each rung runs in a process of its own (`benchmarks.gpu.ladder`), so that a hang or an illegal address names
its rung. `tests/unit/pallas_kernels/test_ladder.py` has the code of each rung, which a CPU interprets.
"""

from dataclasses import dataclass
from typing import Literal, get_args

Kernel = Literal["attention", "fp8", "experts", "mxfp4", "triton"]
KERNELS: tuple[Kernel, ...] = get_args(Kernel)
MOSAIC: tuple[Kernel, ...] = ("attention", "fp8", "experts", "mxfp4")


@dataclass(frozen=True)
class Rung:
    """A check.

    Attributes:
        kernels: cannot be used if it fails.
        case: of the tables beside this module; empty: the rung has code of its own.
    """

    name: str
    kernels: tuple[Kernel, ...]
    case: str = ""


RUNGS = (
    Rung("a copy through registers", MOSAIC),
    Rung("a copy by TMA", MOSAIC),
    Rung("a WGMMA of shared memory", MOSAIC),
    Rung("a WGMMA with an operand in registers", ("attention", "fp8", "mxfp4")),
    Rung("attention: decode, splits", ("attention", "fp8"), "16 bits, 128/128 p64, full, softcap, splits"),
    Rung("attention: window and sinks", ("attention",), "16 bits, 64/64 p16, window 64, sinks"),
    Rung("attention: prefill", ("attention",), "16 bits, prefill, 128/128 p64, full, no groups"),
    Rung("attention: prefill in a window", ("attention",), "16 bits, prefill, 64/64 p16, window 70, sinks, cut"),
    Rung("attention: 8-bit pages", ("fp8",), "fp8 pages, 64/64 p16, window 64, sinks, scales"),
    Rung("experts: 16 bits", ("experts",), "16 bits, edges"),
    Rung("experts: 4 bits", ("mxfp4",), "4 bits, tiles, biases, gpt-oss"),
    Rung("attention: Triton", ("triton",), "16 bits, 64/64 p16, window 64, sinks"),
    Rung("a whole model", ("attention", "experts")),
)
