"""Where each kernel for GPUs has its cases: one list for an operation, beside this module, for all who check.

    tests/unit/pallas_kernels     runs the small ones, interpreted on a CPU
    benchmarks/gpu/numerics.py    runs the same tests on a GPU
    tools/aot                     compiles those of released models for GPUs that are not there

At start an engine checks its own shapes (`jswa.exec.selfcheck`), since these are what will run. A kernel of
`jswa.kernels.TABLE` that lacks one of the four fails a test.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Checked(NamedTuple):
    """Where a kernel's cases are, and who runs them.

    Attributes:
        cases: the module beside this one that lists them, or the start of its name.
        tests: the file below tests/unit/pallas_kernels that compares its numbers.
        compiler: the module below tools.aot that compiles it.
    """

    cases: str
    tests: str
    compiler: str


KERNELS: Mapping[str, Checked] = {
    "attention=mosaic": Checked("attention", "attention/test_paged_attention", "hopper"),
    "attention=mosaic_whole": Checked("attention", "attention/test_whole", "hopper"),
    "attention=mosaic_splits": Checked("attention", "attention/test_splits", "hopper"),
    "attention=triton": Checked("attention", "attention/test_triton", "triton"),
    "attention=triton_whole": Checked("attention", "attention/test_whole", "triton"),
    "experts=mosaic": Checked("experts", "experts/test_grouped_matmul", "experts"),
    "experts=mosaic_overlap": Checked("experts", "experts/test_overlap", "experts"),
    "experts=triton": Checked("experts", "experts/test_triton", "small.grouped"),
    "linear=mosaic": Checked("dense", "experts/test_dense", "small.dense"),
    "elementwise=mosaic": Checked("small.elementwise", "elementwise/test_elementwise", "small.elementwise"),
    "routing=triton": Checked("small.routing", "experts/test_routing", "small.routing"),
    "sampling=triton": Checked("small.sampling", "sampling/test_sampling", "small.sampling"),
}
# Rows of `jswa.kernels.TABLE` for GPUs that are no kernels of jswa's, and what they are.
OTHERS = {"linear=fp8": "XLA's product of 8-bit factors, which whole steps are compiled with"}
