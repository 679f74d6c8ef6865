"""Sampling inside the step: tokens, and which drafts are right."""
