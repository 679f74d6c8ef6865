"""Kernels at serving sizes: how fast they are, and with which tunings. Baselines are beside them."""
