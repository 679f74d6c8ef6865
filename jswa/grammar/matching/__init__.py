"""Grammars and matchers of llguidance, and how they are tried."""
