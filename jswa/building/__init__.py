"""Builds an engine: the devices and their kernels, the weights, the sizes of everything, the compiled programs."""
