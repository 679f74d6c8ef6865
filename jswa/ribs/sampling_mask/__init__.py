"""Sampling masks: the tokens from which each token was drawn, `return_sampling_mask` of a request."""
