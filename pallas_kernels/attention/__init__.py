"""Implementations of `api.paged_attention`, their tunings and their cases."""
