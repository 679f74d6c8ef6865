"""New weights for a running engine: arrays and checkpoint folders to parameters in the form that the engine holds."""
