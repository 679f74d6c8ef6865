"""Paged attention: the call (`api`), its rows and tiles (`rows`), and its implementations."""
