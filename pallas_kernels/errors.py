"""Errors for calls that an implementation cannot serve. No other implementation takes over: the caller decides."""


class NoKernel(ValueError):
    """The requested implementation of attention has no kernel for these shapes or types."""


class NoExpertKernel(ValueError):
    """The requested implementation of the grouped matmul has no kernel for these shapes or types."""
