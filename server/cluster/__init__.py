"""Serving by several replicas of the application behind a relay."""
