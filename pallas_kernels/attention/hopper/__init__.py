"""Paged attention for Hopper GPUs, in Pallas Mosaic GPU.

Reading order: `plan` (shapes, tuning, resources), `heuristics` (the default tuning), `call` (the code around the
kernel), `kernel` (its body, from the top down), `producer` (copies into shared memory), `refs` (its arguments).
"""
