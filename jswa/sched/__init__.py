"""Chooses the rows and tokens of each step. No jax; it meets the device side only in `StepPlan` and tokens."""
