"""Draws of tokens from logits under temperature, min-p, top-k and top-p, for GPUs."""
