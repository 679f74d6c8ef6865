"""New weights for a running engine: arrays to parameters, and the change from one version to the next."""
