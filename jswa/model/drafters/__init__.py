"""Drafters that are models: what a step gives them, and what they give back."""
