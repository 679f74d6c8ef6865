"""A lint of TMA descriptors: the rules of the driver's cuTensorMapEncodeTiled, which no compiler applies.

The driver makes the descriptors on the host when a kernel is loaded, so a shape that it refuses compiles, and fails on
a GPU. Mosaic lowers in Python: `recorded` keeps what each descriptor is asked for.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from jax.experimental.mosaic.gpu import launch_context, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

SWIZZLES = (32, 64, 128)
MOST_RANK, MOST_BOX, ALIGN = 5, 256, 16
MOST_SIZE, MOST_STRIDE = 2**32, 2**40
_NO_SWIZZLE = 16  # Mosaic's number for none


class Descriptor(NamedTuple):
    """A view of an array in global memory, and a box that is copied from it or to it.

    Attributes:
        shape, strides: of the view, the innermost axis last; strides in numbers.
        box: numbers along each axis.
        bits: per number.
        swizzle: bytes, or None.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    bits: int
    swizzle: int | None

    @property
    def bytes(self) -> int:
        """Bytes of a copy."""
        return math.prod(self.box) * self.bits // 8

    @property
    def faults(self) -> list[str]:
        """Return the rules of cuTensorMapEncodeTiled that the descriptor breaks."""
        strides = [stride * self.bits // 8 for stride in self.strides]
        inner, swizzle = self.box[-1] * self.bits // 8, self.swizzle
        found = {
            f"rank {len(self.shape)} is not 1 to {MOST_RANK}": not 1 <= len(self.shape) <= MOST_RANK,
            f"the box has rank {len(self.box)}, the array {len(self.shape)}": len(self.box) != len(self.shape),
            f"sizes {self.shape} are not 1 to 2^32": not all(0 < size <= MOST_SIZE for size in self.shape),
            f"the box {self.box} is not 1 to {MOST_BOX} along each axis": not all(
                0 < size <= MOST_BOX for size in self.box
            ),
            f"the innermost stride is {self.strides[-1]}, not 1": self.strides[-1] != 1,
            f"strides of {strides[:-1]} bytes are no multiples of {ALIGN} below 2^40": any(
                stride % ALIGN or not 0 < stride < MOST_STRIDE for stride in strides[:-1]
            ),
            f"the box's rows of {inner} bytes are no multiple of {ALIGN}": bool(inner % ALIGN),
            f"a swizzle of {swizzle} bytes does not exist": swizzle is not None and swizzle not in SWIZZLES,
            f"the box's rows of {inner} bytes exceed the swizzle of {swizzle}": bool(swizzle)
            and inner > (swizzle or 0),
        }
        return [fault for fault, broken in found.items() if broken]


@contextmanager
def recorded() -> Iterator[list[Descriptor]]:
    """Yield a list of the descriptors of all Mosaic kernels that are lowered inside, one for each copy in the code."""
    found: list[Descriptor] = []
    context: Any = launch_context.LaunchContext
    original = context._get_tma_desc

    def record(self: Any, gmem: Any, transforms: Any, peer: Any, box: Any, swizzle: Any, reduction: Any) -> Any:
        kind = _view(launch_context._find_kernel_argument_for_gmem_ref(gmem).type, transforms)
        strides, _ = kind.get_strides_and_offset()
        bits = utils.bitwidth(kind.element_type)
        bytes_ = None if swizzle in (None, _NO_SWIZZLE) else int(swizzle)
        found.append(Descriptor(tuple(kind.shape), tuple(strides), tuple(box), bits, bytes_))
        return original(self, gmem, transforms, peer, box, swizzle, reduction)

    context._get_tma_desc = record
    try:
        yield found
    finally:
        context._get_tma_desc = original


def _view(kind: Any, transforms: Any) -> Any:
    """Return the type of an array after Mosaic's transforms, some of which tell it only when they are applied."""
    module = ir.Module.create(ir.Location.unknown())  # dropped at the end, with all that is inside
    with ir.InsertionPoint(module.body):
        block = func.FuncOp("view", ([kind], [])).add_entry_block()
    with ir.InsertionPoint(block):
        view = block.arguments[0]
        for transform in transforms:
            view = transform.apply(view)
        return ir.MemRefType(view.type)


@contextmanager
def linted() -> Iterator[None]:
    """Raise ValueError for the kernels that are lowered inside if the driver would refuse one of their descriptors."""
    with recorded() as found:
        yield
    faults = {f"{descriptor}: {fault}" for descriptor in found for fault in descriptor.faults}
    if faults:
        raise ValueError("the driver refuses TMA descriptors:\n" + "\n".join(sorted(faults)))
