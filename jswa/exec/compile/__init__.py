"""Compiles programs ahead of time, keeps them in files, and chooses which one a plan runs in."""
