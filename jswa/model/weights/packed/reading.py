"""How a checkpoint's matrices are read in a form: what a module of this folder does, as `table` lists it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Shaped

from jswa.forms.base.form import Form
from jswa.model.hf.assemble import Read
from jswa.model.hf.source import Source
from jswa.model.transformer import Params
from jswa.model.weights.dequantize import Weight
from jswa.model.weights.placement import Placement
from jswa.model.weights.safetensors_files import TensorReader
from pallas_kernels import Linear

Arrays = dict[str, Shaped[np.ndarray, "..."]]  # the parameters of one matrix in host memory, by their names


class StoredMatrix(NamedTuple):
    """A matrix, or a stack of experts, in a checkpoint.

    Attributes:
        source: its tensors.
        weights: how each tensor is stored, by key.
        shape: shape and type of the matrix if it is not quantized.
        read: reads rows of a tensor as numbers.
    """

    name: str
    source: Source
    reader: TensorReader
    weights: Mapping[str, Weight]
    shape: jax.ShapeDtypeStruct
    read: Read


@dataclass(frozen=True)
class Reading:
    """How matrices are read in a form.

    Attributes:
        stored: returns how a matrix is stored, for `load`, if the checkpoint has it in this form; else None.
        load: reads a matrix, and returns its parameters on the devices.
        modes: the values of `quantization` besides "auto" in which a matrix stays in this form.
        fitted: returns the parameters of a converted matrix as the devices and the implementation of linear layers need
            them. None: as they are.
    """

    form: Form
    stored: Callable[[StoredMatrix], Any]
    load: Callable[[StoredMatrix, Any, Placement], Params]
    modes: tuple[str, ...] = ()
    fitted: Callable[[str, Arrays, jax.ShapeDtypeStruct, Placement, Linear], Arrays] | None = None
