"""Kernels for a CPU in C++, which XLA calls: products, experts and paged attention.

`build` compiles them into one library, `library` loads it. Where there is no library, nothing else here can be called.
"""
