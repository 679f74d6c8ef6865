"""The learned policy: evicts the window or leaf that requests will probably miss least."""
