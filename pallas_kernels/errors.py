"""Errors for calls that an implementation cannot serve. No other implementation takes over: the caller decides."""

from typing import ClassVar


class NoKernel(ValueError):
    """The chosen implementation of an operation cannot serve these shapes, types or models.

    Attributes:
        operation: what the implementation is of.
    """

    operation: ClassVar[str]


class NoAttentionKernel(NoKernel):
    """The chosen implementation of attention cannot serve these shapes or types."""

    operation = "attention"


class NoExpertKernel(NoKernel):
    """The chosen implementation of the grouped matmul cannot serve these shapes or types."""

    operation = "experts"


class NoLinearKernel(NoKernel):
    """The chosen implementation of linear layers cannot serve these types."""

    operation = "linear"


class NoSamplingKernel(NoKernel):
    """The chosen implementation of sampling cannot serve these shapes or types."""

    operation = "sampling"


class NoElementwiseKernel(NoKernel):
    """The chosen implementation of norms, rotary embedding and KV writes cannot serve these shapes or types."""

    operation = "elementwise"


class NoRoutingKernel(NoKernel):
    """The chosen implementation of routing cannot serve this router."""

    operation = "routing"
