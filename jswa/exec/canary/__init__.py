"""Compares the kernels that an engine runs with plain XLA, at start, on small content."""
