"""Pooled hidden states of prompts: `pooling` of a request."""
