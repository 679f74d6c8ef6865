"""The grouped product for NVIDIA GPUs since Ampere, in Triton: `plan`, `call` and `kernel` as in `hopper`."""
