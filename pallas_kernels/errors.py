"""Errors for calls that an implementation cannot serve. No other implementation takes over: the caller decides."""


class NoKernel(ValueError):
    """The requested implementation of attention has no kernel for these shapes or types."""


class NoExpertKernel(ValueError):
    """The requested implementation of the grouped matmul has no kernel for these shapes or types."""


class NoLinearKernel(ValueError):
    """The requested implementation of linear layers has no kernel for these types."""


class NoSamplingKernel(ValueError):
    """The chosen implementation of sampling cannot serve these shapes or types."""


class NoGlueKernel(ValueError):
    """The chosen implementation of norms, rotary embedding and KV writes cannot serve these shapes or types."""


class NoRoutingKernel(ValueError):
    """The chosen implementation of routing cannot serve this router."""
