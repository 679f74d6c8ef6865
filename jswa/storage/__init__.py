"""Files that jswa writes and reads: JSON, folders, plans, converted checkpoints, saved prefix caches."""
