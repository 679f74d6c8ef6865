"""Host side of the KV arena: where pages lie, who holds them. No jax, not even indirectly."""
