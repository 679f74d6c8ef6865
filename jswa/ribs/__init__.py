"""Ribs: what is optional in an engine. Each is a folder here, a line in `table` and a line in `traced`."""
