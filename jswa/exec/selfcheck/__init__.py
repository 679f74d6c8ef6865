"""Compares the kernels that an engine runs with plain XLA in float32, at start, on small content."""
