"""Paged attention for NVIDIA GPUs since Ampere, in Triton: `plan`, `heuristics`, `call` and `kernel` as in `hopper`."""
