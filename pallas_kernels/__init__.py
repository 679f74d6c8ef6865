"""Kernels over plain arrays: paged attention, the matrices of experts, weights of 8 and 4 bits.

They know pages, windows and ragged rows, and nothing of requests. The Hopper kernels share `mosaic` (the operations
that they are written with), `interpreter` (how tests run them on a CPU), `ring` (stages in shared memory) and `hopper`
(sizes of the GPU).

Here are the names of the implementations of each operation; `jswa.kernels` chooses between them. No jax is imported.
"""

from typing import Literal

Attention = Literal["reference", "xla", "cpu", "mosaic", "mosaic_splits", "mosaic_whole", "triton", "triton_whole"]
Experts = Literal["reference", "xla", "cpu", "mosaic", "mosaic_overlap", "triton"]
Linear = Literal["xla", "cpu", "mosaic", "fp8"]
Elementwise = Literal["xla", "cpu", "mosaic"]
Routing = Literal["xla", "triton"]  # "xla" is that of jswa
# "xla" is that of jswa; so is "cpu", but for sums, which the library of CPU kernels adds (`elementwise.sums`).
Sampling = Literal["xla", "triton", "cpu"]
Sums = Literal["xla", "cpu", "triton"]
