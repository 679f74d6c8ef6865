"""The grouped product of experts for Hopper GPUs, in Pallas Mosaic GPU."""
