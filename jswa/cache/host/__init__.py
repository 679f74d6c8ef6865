"""A second prefix cache in host memory, for what the device evicts."""
