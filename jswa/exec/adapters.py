"""Writes LoRA adapters into the room that is reserved for them, between two steps; see `jswa.model.lora`.

Every program is compiled at start. The programs of the steps do not know which adapters are loaded.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from jswa.exec.compile.store import ProgramStore, compiled, named
from jswa.exec.launches import SET_ADAPTER, ProgramLaunch
from jswa.exec.mesh import mesh_of, on_mesh, put, specs_of
from jswa.model.binding import run_dtype
from jswa.model.lora import Pairs, adapted_names, adapter_params
from jswa.model.transformer import Params
from jswa.model.weights.lora.files import room_shapes
from jswa.model.weights.placement import Placement, empty
from jswa.options.lora import LoraRoom

Beside = tuple[Float[Array, "*E K R"], Float[Array, "*E R C"], Int32[Array, " R"]]  # A, B and owner of a matrix
Slot = tuple[Float[Array, "*E K r"], Float[Array, "*E r C"], Int32[Array, " r"]]  # the columns of one of its slots
NOBODY = -1  # owner of columns without an adapter; tokens without an adapter have 0


class _Matrix(NamedTuple):
    """The room beside a matrix: its parameters' names, their shapes in one slot, and the program that writes a slot."""

    names: tuple[str, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    write: jax.stages.Compiled


class AdapterRoom:
    """The room beside all matrices of a model.

    Args:
        placement: of the parameters on the devices.
        rank: largest rank of a module.
        params: the parameters, which contain the room.
        store: keeps compiled programs for later starts.
    """

    def __init__(self, placement: Placement, rank: int, params: Params, store: ProgramStore | None = None) -> None:
        self._placement = placement
        self._mesh = mesh_of(next(iter(params.values())))
        self._matrices: list[tuple[str, _Matrix]] = []
        of_slot = room_shapes(placement.model, LoraRoom(1, rank, experts=True), run_dtype(params))
        programs: dict[str, jax.stages.Compiled] = {}
        for name in adapted_names(params):
            names = tuple(adapter_params(name, 0, 0, 0))
            beside, shapes = tuple(params[one] for one in names), tuple(of_slot[one] for one in names)
            kind = str([(one.shape, one.sharding) for one in beside])
            if kind not in programs:
                slot = tuple(placement.shape(*one) for one in zip(names, shapes, strict=True))
                arguments = beside, slot, np.int32(0)
                run = on_mesh(write_slot, self._mesh, arguments, specs_of(beside))
                programs[kind] = compiled(store, named(write_slot), jax.jit(run, donate_argnums=0), arguments)
            self._matrices.append((name, _Matrix(names, shapes, programs[kind])))

    def launches(self, slot: int, number: int, pairs: Pairs) -> Iterator[ProgramLaunch]:
        """Yield the launches that write an adapter to a slot, one for each matrix.

        Matrices that the adapter does not change are left alone: none of their columns has its number.
        """
        for index, (name, _) in enumerate(self._matrices):
            if name in pairs:
                a, b = (one.astype(np.float32) for one in pairs[name])  # exact; `run` converts them back
                yield ProgramLaunch(SET_ADAPTER, (np.array((index, slot, number), np.int32), a, b))

    def idle_launches(self) -> Iterator[ProgramLaunch]:
        """Yield the launches that clear the first slot, for an engine that has no adapter yet."""
        for index, (_, matrix) in enumerate(self._matrices):
            (*lead, rows, _), (*_, columns), _ = (one.shape for one in matrix.shapes)
            nothing = np.zeros((*lead, rows, 0), np.float32), np.zeros((*lead, 0, columns), np.float32)
            yield ProgramLaunch(SET_ADAPTER, (np.array((index, 0, NOBODY), np.int32), *nothing))

    def run(self, params: Params, arrays: tuple[Any, ...]) -> Params:
        """Run a launch; return the parameters with the new arrays. The old ones are donated."""
        (index, slot, number), a, b = arrays
        names, shapes, write = self._matrices[index][1]
        new = [empty(one.shape, np.dtype(one.dtype)) for one in shapes]
        rank = a.shape[-1]
        for array, fill in zip(new, (0, 0, NOBODY), strict=True):
            array.fill(fill)
        new[0][..., :rank], new[1][..., :rank, :], new[2][:rank] = a, b, number
        placed = tuple(self._placement.put(*one) for one in zip(names, new, strict=True))
        first = put(np.int32(slot * shapes[2].shape[0]), self._mesh)
        beside = write(tuple(params[one] for one in names), placed, first)
        return {**params, **dict(zip(names, beside, strict=True))}


def write_slot(beside: Beside, slot: Slot, first: Int32[Array, ""]) -> Beside:
    """Replace the columns of A, the rows of B and the owners from `first` on by those of a slot."""
    (a, b, owner), (of_a, of_b, of_owner) = beside, slot
    return (
        lax.dynamic_update_slice_in_dim(a, of_a, first, axis=a.ndim - 1),
        lax.dynamic_update_slice_in_dim(b, of_b, first, axis=b.ndim - 2),
        lax.dynamic_update_slice_in_dim(owner, of_owner, first, axis=0),
    )
