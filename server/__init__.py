"""The HTTP front end.

It imports no jax, and uses the engine through `jswa.engine` and `jswa.llm` only.
"""
