"""config.json of each architecture, from its metadata."""
