"""Decides what each step runs. No jax, not even indirectly; meets the device side only in `StepPlan` and tokens."""
