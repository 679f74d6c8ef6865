"""Conversion between requests and tokens: prompts, chat messages, templates, log probabilities."""
