"""Sampling inside the step: tokens, log probabilities and which drafts are right."""
