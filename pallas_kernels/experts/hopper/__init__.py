"""The grouped matmul of experts for Hopper GPUs, in Pallas Mosaic GPU.

Reading order: `plan` (shapes, tuning, resources), `heuristics` (the default tuning), `call` (the list of tiles and the
call), `kernel` (its body), `mxfp4`, `eight_bits` and `int4` (weights of 4 and 8 bits as operands),
`overlap` (a main loop that unpacks while it multiplies).
"""
