"""Kernels for a CPU in C++, which XLA calls: products, experts and paged attention.

`build` compiles them into one library, `first_use` does so where there is none yet, `library` loads it. Without the
library nothing else here can be called.
"""
