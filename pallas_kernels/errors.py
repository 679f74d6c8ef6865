"""What an implementation cannot serve. Never another one's turn: the caller decides."""


class NoKernel(ValueError):
    """The named implementation of attention has no kernel for these shapes or types."""


class NoExpertKernel(ValueError):
    """The named implementation of the grouped matmul has no kernel for these shapes or types."""
