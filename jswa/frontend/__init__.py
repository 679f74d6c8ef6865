"""Between callers and the engine: requests in, outputs back, and the thread or the lock that runs the steps. No jax."""
