"""The prefix cache: the radix tree, where a row starts in it, and which of its pages are evicted first. No jax."""
