"""Lays the matrices of a model out as the products of a backend read them: in panels, in tiles, or outputs first."""

import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, UInt8

from jswa.errors import ConfigError
from jswa.forms.base.form import key_of
from jswa.forms.base.names import LINEAR, OUTPUTS_FIRST, fp8_names, linear_in_16_bits
from jswa.forms.base.panels import Room, moved
from jswa.forms.table import FORMS
from jswa.kernels import refused
from pallas_kernels import Linear
from pallas_kernels.experts.dense import fits
from pallas_kernels.experts.eight_bits import TILE
from pallas_kernels.fp8 import UNIT

# The names from eh_proj on are those of drafters.
_MATRIX = re.compile(
    r"(\.(attention\.(qkv|out|gate)|(mlp|moe)\.(router|shared_gate)|per_layer\.(gate|project)|gate_up|down|eh_proj"
    r"|streams\.(router|predict_by|correct_by|laurel_left|laurel_right))"
    r"|^(lm_head|fc|pre|post|per_layer\.project|streams\.(begin|end)))$"
)
_EXPERTS = re.compile(r"\.(gate_up|down)$")
_SMALL = 64 * 2**10  # bytes; arrays below stay where they are


def lay_out(params: dict[str, Array], *, linear: Linear, experts: bool) -> None:
    """Replace matrices by what their products read, one after the other.

    For "fp8", N.values [K, C] of linear layers in e4m3 becomes N.rows [C, K]; `transformer.bind` sees from the name
    that activations are rounded too. For "mosaic", those of forms that have tiles become these
    (`Form.tiled`), and those in 16 bits stay as they are. Raises ConfigError if such products cannot have a matrix
    of that size.

    Panels are of numbers, values of 8 bits or codes of 4 bits (`Form.panelled`). A matrix [*E, K, C] becomes
    [*E, P, K, 32]; `transformer.bind` sees it from the number of axes. All large arrays of `params` are moved to huge
    pages.

    Args:
        params: of one device, if it gets panels.
        linear: the backend of linear layers. For "cpu" their matrices become panels, and the head, if it is not the
            embedding.
        experts: make panels of the stacked matrices of experts. Those in MXFP4 keep their form, since their outputs
            are rows.
    """
    if linear == "fp8":
        _lay_out_fp8(params)
    if linear == "mosaic":
        lay_out_tiles(params)
    if linear != "cpu" and not experts:
        return
    room, placed = Room(sum(array.nbytes for array in params.values())), set[str]()
    for form in (form for form in FORMS if form.panelled is not None):
        for name in [name for name in form.names(params) if _MATRIX.search(name)]:
            stacked = _EXPERTS.search(name) is not None and params[key_of(name, form.ends[0])].ndim == 3
            if form.panelled is not None and (experts if stacked else linear == "cpu"):
                placed.update(form.panelled(name, params, room))
    for name in [name for name, array in params.items() if name not in placed and array.nbytes >= _SMALL]:
        params[name] = moved(params.pop(name), room)


def lay_out_tiles(params: dict[str, Array]) -> None:
    """Replace the matrices of linear layers by the tiles that their forms have, one after the other.

    On the way a matrix takes two or three times its bytes (compiled for an H200).

    Raises ConfigError if a device's part of a matrix does not fit.
    """
    for form in FORMS:
        for name in [name for name in form.names(params) if LINEAR.search(name)]:
            if form.tiled is not None and params[key_of(name, form.ends[0])].ndim == 2:
                form.tiled(name, params)


def require_form(params: Mapping[str, Array], linear: Linear) -> None:
    """Raise ConfigError if a backend of linear layers is named for forms of weights that a matrix does not have.

    All matrices must be of those that "mosaic" takes, and some for "fp8".
    """
    if linear == "mosaic":
        for name in linear_in_16_bits(params):
            sides = params[name].sharding.shard_shape(params[name].shape)
            if not fits(*sides):
                limit = f"{name} is {list(sides)} on each device: both must be multiples of {TILE}, or linear=xla"
                raise refused("linear", "mosaic", limit)
    if linear == "fp8" and not any(name.endswith(OUTPUTS_FIRST) for name in params):
        limit = "no linear layer is held in float8 with a scale per output"
        raise ConfigError("quantization", "w8a8_fp8", limit)


def _lay_out_fp8(params: dict[str, Array]) -> None:
    for name in fp8_names(params):
        sides = params[f"{name}.values"].sharding.shard_shape(params[f"{name}.values"].shape)
        if any(side % UNIT for side in sides):
            limit = f"{name} is {list(sides)} on each device: both must be multiples of {UNIT}"
            raise ConfigError("quantization", "w8a8_fp8", limit)
        params[f"{name}{OUTPUTS_FIRST}"] = _outputs_first(params.pop(f"{name}.values"))


def _outputs_first(matrix: UInt8[Array, "K C"]) -> UInt8[Array, "C K"]:
    """Return the transposed matrix, each device's part transposed where it is."""
    sharding = matrix.sharding
    if isinstance(sharding, NamedSharding):
        inputs, outputs = (*sharding.spec, None, None)[:2]
        sharding = NamedSharding(sharding.mesh, PartitionSpec(outputs, inputs))  # type: ignore[no-untyped-call]
    turned: Array = jax.jit(jnp.transpose, out_shardings=sharding)(matrix)
    return turned
