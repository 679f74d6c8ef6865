"""The decoder on the kernels of `pallas_kernels.elementwise`: few calls between products and attention."""
