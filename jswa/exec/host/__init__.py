"""The contents of the second prefix cache, in host memory."""
