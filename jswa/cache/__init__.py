"""The KV arena on the host: where pages lie, who holds them, how much fits. No jax, not even indirectly."""
