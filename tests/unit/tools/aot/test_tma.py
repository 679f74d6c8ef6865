"""Tests of the lint of TMA descriptors: each rule of the driver's, and what a lowered kernel asks for."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import mosaic
from tools.aot.measures.tma import Descriptor, linted, recorded

GOOD = Descriptor((64, 8, 2, 8, 64), (8192, 1024, 64, 128, 1), (1, 8, 2, 8, 64), 16, 128)


@dataclass(frozen=True)
class Copy:
    """A kernel that copies a box of an array into shared memory, and its first row back."""

    columns: int
    swizzle: int

    def lower(self) -> None:
        """Lower the kernel for a GPU."""

        def body(x: mosaic.Ref, out: mosaic.Ref, box: mosaic.Ref, ready: mosaic.Ref) -> None:
            mosaic.plgpu.copy_gmem_to_smem(x.at[0], box, ready)
            mosaic.plgpu.barrier_wait(ready)
            mosaic.plgpu.copy_smem_to_gmem(box, out)
            mosaic.plgpu.wait_smem_to_gmem(0)

        shape = 64, self.columns
        kind = jnp.dtype(jnp.bfloat16)
        scratch = {"box": mosaic.tiled(shape, kind, self.swizzle), "ready": mosaic.plgpu.Barrier()}
        run = mosaic.kernel(body, name="copy", outputs=[(shape, kind)], grid={"x": 1}, num_threads=1, scratch=scratch)
        x = jax.ShapeDtypeStruct((3, *shape), kind)  # type: ignore[no-untyped-call]
        jax.jit(lambda x: run(x)[0]).trace(x).lower(lowering_platforms=("cuda",))


def test_descriptors_of_a_kernel_are_recorded() -> None:
    """As views in tiles of eight rows by the swizzle, and the box that is copied at a time."""
    with recorded() as found:
        Copy(128, 128).lower()
    load, store = found
    assert load == Descriptor((3, 8, 2, 8, 64), (8192, 1024, 64, 128, 1), (1, 8, 2, 8, 64), 16, 128)
    assert store == Descriptor((8, 2, 8, 64), (1024, 64, 128, 1), (8, 2, 8, 64), 16, 128)
    assert load.bytes == store.bytes == 64 * 128 * 2
    assert load.faults == store.faults == []


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        (GOOD, None),
        (GOOD._replace(shape=(3, *GOOD.shape), strides=(8, *GOOD.strides), box=(1, *GOOD.box)), "rank 6 is not 1 to 5"),
        (GOOD._replace(box=(8, 2, 8, 64)), "the box has rank 4, the array 5"),
        (GOOD._replace(shape=(2**32 + 1, 8, 2, 8, 64)), "are not 1 to 2^32"),
        (GOOD._replace(shape=(0, 8, 2, 8, 64)), "are not 1 to 2^32"),
        (GOOD._replace(box=(1, 8, 2, 257, 64)), "is not 1 to 256 along each axis"),
        (GOOD._replace(strides=(8192, 1024, 64, 128, 2)), "the innermost stride is 2, not 1"),
        (GOOD._replace(strides=(8192, 1024, 68, 128, 1)), "are no multiples of 16 below 2^40"),
        (GOOD._replace(strides=(2**39, 1024, 64, 128, 1)), "are no multiples of 16 below 2^40"),
        (GOOD._replace(box=(1, 8, 2, 8, 12)), "the box's rows of 24 bytes are no multiple of 16"),
        (GOOD._replace(swizzle=256), "a swizzle of 256 bytes does not exist"),
        (GOOD._replace(swizzle=64), "the box's rows of 128 bytes exceed the swizzle of 64"),
        (GOOD._replace(swizzle=None, bits=8), None),
    ],
)
def test_a_copy_that_breaks_a_rule_has_a_fault(wrong: Descriptor, fault: str | None) -> None:
    """Each is named."""
    assert len(wrong.faults) == (fault is not None)
    assert fault is None or fault in wrong.faults[0]


def test_what_the_driver_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any kernel that is lowered inside."""
    with linted():
        Copy(64, 64).lower()
    monkeypatch.setattr("tools.aot.measures.tma.MOST_BOX", 4)
    refused = r"the driver refuses TMA descriptors:\nDescriptor\(.* is not 1 to 4 along"
    with pytest.raises(ValueError, match=refused), linted():
        Copy(128, 64).lower()
