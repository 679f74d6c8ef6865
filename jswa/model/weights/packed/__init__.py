"""Weights of packed integers: how checkpoints store them, and how the engine holds them in 4 bits."""
