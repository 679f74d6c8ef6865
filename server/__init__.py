"""The HTTP front end.

It imports no jax: it talks to the engine through `jswa.engine` and `jswa.llm` only.
"""
