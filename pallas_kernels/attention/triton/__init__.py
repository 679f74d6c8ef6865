"""Paged attention for NVIDIA GPUs since Ampere, in Triton."""
