"""Elementwise operations as Hopper kernels in Pallas Mosaic GPU.

They read global memory straight into registers, write it from registers, and share nothing between thread blocks.
"""
