"""The choice of experts and the order of rows in one kernel, for GPUs."""
