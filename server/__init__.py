"""The HTTP front end.

It imports no jax: it loads a model by `jswa.llm`, and knows its engine by `jswa.frontend.engine_protocol`.
"""
