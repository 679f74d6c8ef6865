"""The decoder on the kernels of `pallas_kernels.glue`: few calls between products and attention."""
