"""The forms in which matrices are held (`jswa.forms`): as a checkpoint has them, rounded to 8 bits, or widened."""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, get_args

from jswa.errors import ConfigError
from jswa.forms.base.names import ENDS, LINEAR
from jswa.forms.table import form_at
from jswa.kernels import refused
from jswa.model.transformer import Params
from jswa.model.weights.packed import eight_bits, mxfp4
from jswa.model.weights.packed.reading import Reading, StoredMatrix
from jswa.model.weights.packed.table import READINGS
from jswa.model.weights.placement import Placement
from pallas_kernels import Linear
from pallas_kernels.experts.api import Implementation

QuantizationMode = Literal["none", "auto", "int8", "fp8", "mxfp4"]


class Chosen(NamedTuple):
    """The form in which a matrix is read, and how the checkpoint has it, as `Reading.stored` says."""

    reading: Reading
    how: Any


def choose_formats(
    matrices: Iterable[StoredMatrix], mode: QuantizationMode, experts: Implementation, linear: Linear = "xla"
) -> dict[str, Chosen]:
    """Return the storage format of each matrix that is not stored in the engine's dtype.

    Mode "auto" leaves matrices as the checkpoint has them, in each form of `READINGS` that their kernel reads. "int8"
    and "fp8" quantize linear layers, embedding and head, and leave MXFP4 experts as they are. "none" stores everything
    in the engine's dtype. "mxfp4" is "auto" for checkpoints that have their experts in MXFP4. Experts for kernels that
    are the default of a device ("mosaic") or read no other form ("triton") are held in the engine's dtype unless they
    are in MXFP4 or the mode names 8 bits: no GPU has measured the others yet. Experts in e4m3 with scales of blocks
    stay so in mode "fp8", but for the kernels of a CPU, and in mode "auto" for the kernel that reads no 16 bits
    ("mosaic_overlap"). So do linear layers in both modes if "mosaic" runs them (`linear`). Raises ConfigError for other
    checkpoints in mode "mxfp4", and for experts in 8 bits if Triton's kernel runs them.
    """
    if mode == "none":
        return {}
    wanted = [matrix for matrix in matrices if LINEAR.search(matrix.name)]
    stacks = [matrix for matrix in wanted if _is_stack(matrix)]
    packed = bool(stacks) and all(mxfp4.READING.stored(stack) for stack in stacks)
    for stack in stacks:
        _require_mxfp4(stack.name, mode, stored=packed)
    readings = [reading for reading in READINGS if packed or reading is not mxfp4.READING]
    found: dict[str, Chosen] = {}
    for matrix in matrices:
        is_matrix, axes = LINEAR.search(matrix.name), len(matrix.shape.shape)
        kept = is_matrix or matrix.name in ENDS
        chosen = _as_stored(matrix, readings, mode, experts if axes == 3 else linear) if kept else None
        if chosen is None and mode in ("int8", "fp8") and (is_matrix or matrix.name in ENDS):
            _require_runnable(mode, axes, experts)
            chosen = Chosen(eight_bits.READING, mode)
        found |= {} if chosen is None else {matrix.name: chosen}
    return found


def _as_stored(matrix: StoredMatrix, readings: Iterable[Reading], mode: QuantizationMode, kernel: str) -> Chosen | None:
    """Return the form in which the checkpoint has a matrix, if it stays in it for a mode and a kernel."""
    for reading in readings:
        form, named = reading.form, mode in reading.modes
        if matrix.name in ENDS:
            kernels = form.outer
        else:
            kernels = form.linear if not _is_stack(matrix) else (*form.experts, *(form.named if named else ()))
        if kernel in kernels and (named or mode in ("auto", "mxfp4")):
            how = reading.stored(matrix)
            if how is not None:
                return Chosen(reading, how)
    return None


def _is_stack(matrix: StoredMatrix) -> bool:
    return len(matrix.shape.shape) == 3


def reformat(name: str, found: Params, placement: Placement, mode: QuantizationMode, experts: Implementation) -> Params:
    """Return a matrix in the storage format that the engine asks for.

    Raises ConfigError if its current format does not allow that.

    Args:
        found: the matrix as one or two parameters that are on the devices already.
    """
    if name in found:
        _require_mxfp4(name, mode, stored=not (LINEAR.search(name) and found[name].ndim == 3))
        if mode not in ("int8", "fp8") or not (LINEAR.search(name) or name in ENDS):
            return found
        _require_runnable(mode, found[name].ndim, experts)
        return _for_kernel(name, eight_bits.quantize_on_devices(name, found[name], mode, placement), experts, placement)
    form, arrays = form_at(name, found)
    modes = form.modes(arrays)
    if mode != "auto" and mode not in modes:
        others = " or ".join(("auto", *(one for one in modes if one in get_args(QuantizationMode))))
        raise ConfigError("quantization", mode, f"{name} is stored as {modes[0]}: must be {others}")
    if mode == "auto" and experts in form.rounded_for and arrays[form.ends[0]].ndim == 3:
        limit = f"{name} has a scale per block, which it cannot read: must be xla, or quantization must be fp8"
        raise refused("experts", experts, limit)
    return _for_kernel(name, found, experts, placement)


def _require_mxfp4(name: str, mode: QuantizationMode, *, stored: bool) -> None:
    """Raise ConfigError if experts should be in MXFP4 and the checkpoint does not store them so."""
    if mode == "mxfp4" and not stored:
        limit = f"{name} is not stored in MXFP4, and jswa does not round to it: must be auto, none, int8 or fp8"
        raise ConfigError("quantization", mode, limit)


def _require_runnable(mode: QuantizationMode, axes: int, experts: Implementation) -> None:
    """Raise ConfigError for experts in 8 bits if Triton's kernel is to run them."""
    if axes == 3 and experts == "triton":
        raise ConfigError("quantization", mode, "experts in 8 bits need experts=xla or experts=mosaic in kernels")


def load_matrix(matrix: StoredMatrix, chosen: Chosen, experts: Implementation, placement: Placement) -> Params:
    """Read one matrix from a checkpoint in the form that is chosen, and return its parameters."""
    found = chosen.reading.load(matrix, chosen.how, placement)
    return _for_kernel(matrix.name, found, experts, placement)


def _for_kernel(name: str, found: Params, experts: Implementation, placement: Placement) -> Params:
    """Return a matrix as its kernel reads it: a stack of experts in the layout that its form has for it."""
    form, arrays = form_at(name, found)
    if form.stacked is None or arrays[form.ends[0]].ndim != 3:
        return found
    return form.stacked(name, arrays, experts, placement)
