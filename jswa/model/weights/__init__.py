"""Checkpoint files to parameters: read, dequantize, place on devices, hold in 16, 8 or 4 bits."""
