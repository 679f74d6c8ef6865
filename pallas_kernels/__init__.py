"""Kernels over plain arrays: paged attention, the matrices of experts, weights of 8 and 4 bits.

They know pages, windows and ragged rows, and nothing of requests. The Hopper kernels share `mosaic` (the operations
that they are written with), `interpreter` (how tests run them on a CPU), `ring` (stages in shared memory) and `hopper`
(sizes of the GPU).
"""
