"""A pytest plugin that breaks one kernel on purpose, to show that a check can fail: KERNEL_FAULT names the fault.

    PYTEST_PLUGINS=tests.support.kernels.faults KERNEL_FAULT="sinks dropped" pytest ...

Nothing here may import jax before conftest has set its environment.
"""

import os
from collections.abc import Callable
from typing import Any


def window_too_short() -> None:
    """A window ends one key early."""
    import jax.numpy as jnp

    from pallas_kernels.attention.rows import AttentionParams

    original = AttentionParams.first_visible

    def first_visible(self: AttentionParams, position: Any) -> Any:
        found = original(self, position)
        return found if self.window is None else found + jnp.minimum(found, 1)

    AttentionParams.first_visible = first_visible  # type: ignore[method-assign]


def sinks_dropped() -> None:
    """The softmax starts without its sinks."""
    from pallas_kernels.attention.hopper import call

    original = call.paged_attention

    def paged_attention(*arguments: Any, sinks: Any = None, **keywords: Any) -> Any:
        return original(*arguments, sinks=None, **keywords)

    call.paged_attention = paged_attention


def scales_swapped() -> None:
    """A tile of 4-bit weights takes the scales of its two halves for each other."""
    from pallas_kernels.experts.hopper import mxfp4

    names = vars(mxfp4)  # it imports the function by its name
    original = names["tile_numbers"]

    def tile_numbers(words: Any, scales: Any) -> Any:
        return original(words, ((scales & 255) << 8) | ((scales >> 8) & 255))

    names["tile_numbers"] = tile_numbers


def next_column() -> None:
    """Page ids are read from the next column of the page table."""
    from pallas_kernels.attention.hopper import refs

    original = refs.WorkItem.of.__func__  # type: ignore[attr-defined]

    def of(cls: type[refs.WorkItem], plan: Any, given: Any) -> refs.WorkItem:
        import dataclasses

        item: refs.WorkItem = original(cls, plan, given)
        return dataclasses.replace(item, first_page=item.first_page - 1)

    refs.WorkItem.of = classmethod(of)  # type: ignore[method-assign, assignment]


def not_accumulated() -> None:
    """A WGMMA with an operand in registers begins at zero, not at its accumulator."""
    from pallas_kernels import mosaic

    original = mosaic.accumulate

    def accumulate(total: Any, a: Any, b: Any) -> Any:
        return original(0 * total, a, b)

    mosaic.accumulate = accumulate


FAULTS: dict[str, Callable[[], None]] = {
    "window too short": window_too_short,
    "sinks dropped": sinks_dropped,
    "scales of 4-bit weights swapped": scales_swapped,
    "next column of the page table": next_column,
    "products not accumulated": not_accumulated,
}


def pytest_sessionstart() -> None:
    """Break the kernel that the environment names."""
    FAULTS[os.environ["KERNEL_FAULT"]]()
