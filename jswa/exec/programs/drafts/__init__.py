"""Drafters with weights inside the step."""
