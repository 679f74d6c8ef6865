"""New weights, checked and in the form in which the engine holds its parameters, before anything of it changes.

A source is a tree of arrays, or an iterable of (name, array), with the names of a Hugging Face checkpoint or the
decoder's own; or a checkpoint folder; or a file of arrays that another process hands over. Arrays on devices are
converted there: they never pass through the host.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from jswa.architecture import ModelConfig
from jswa.errors import CheckpointError, WeightsError, is_out_of_memory
from jswa.forms.base.names import BLOCK_SCALES, OUTPUTS_FIRST, SCALES
from jswa.forms.layouts import lay_out
from jswa.model.binding import param_shapes
from jswa.model.hf.source import Source, TensorPart
from jswa.model.hf.tensor_map import canonical_name, sources, unused_names
from jswa.model.lora import without_adapters
from jswa.model.transformer import Params
from jswa.model.weights.formats import QuantizationMode, reformat
from jswa.model.weights.load import load_checkpoint
from jswa.model.weights.placement import Placement
from jswa.running.assembly import assemble_arrays, put_whole
from jswa.running.handed_over import read_handed_over
from pallas_kernels import Linear
from pallas_kernels.experts.api import Implementation

_HEAD, _EMBED = "lm_head.weight", "model.embed_tokens.weight"
_FLOATS = tuple(map(jnp.dtype, ("float32", "bfloat16", "float16")))
_KINDS: dict[str, QuantizationMode] = {"int8": "int8", "uint8": "fp8", "float8_e4m3fn": "fp8"}
_CODES = ".values", ".tiles", OUTPUTS_FIRST  # of matrices in 8 bits
Weights = Mapping[str, Any] | Iterable[tuple[str, Any]] | str | Path


@dataclass(frozen=True)
class WeightsStager:
    """Turns new weights into parameters like those that an engine has. It holds no arrays; any thread may use it.

    Attributes:
        model: config of the whole model, not of a device's part.
        dtype: of the activations, and of parameters that are not quantized.
        held: shape, dtype and sharding of each parameter of the engine, without adapters.
        quantization: as the engine was told to hold its matrices.
        experts: the implementation that runs experts.
        linear, expert_panels: see `lay_out`.
    """

    model: ModelConfig
    dtype: jnp.dtype
    placement: Placement
    held: Mapping[str, jax.ShapeDtypeStruct]
    quantization: QuantizationMode
    experts: Implementation
    linear: Linear
    expert_panels: bool

    def stage(self, source: Weights) -> Params:
        """Return new parameters, on the engine's devices and beside its own; nothing of the engine has changed.

        Arrays must be float32, bfloat16 or float16; they are rounded to the engine's type. The result shares no memory
        with the source. It lacks what the source does not have and the engine keeps: LoRA adapters, scales of KV.
        Raises WeightsError that names the first tensor that is missing, unknown, given twice, or of a wrong shape or
        type; and if there is no memory for a second copy of the weights.
        """
        try:
            if isinstance(source, str | Path):
                if not os.path.isfile(source):  # false for names that no file can have
                    return self._require_held(self._read(Path(source)))
                source = _handed_over(Path(source))
            return self._require_held(dict(self._converted(dict(_named_arrays(source)))))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            limit = "must fit beside the weights that the engine has: free these first with sleep(level=2)"
            raise WeightsError("weights", "all parameters", limit) from error

    def checkpoint_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the tensors of a checkpoint of this model."""
        return {part.key: part.shape for source in sources(self.model).values() for part in source.parts}

    def _read(self, folder: Path) -> Params:
        try:
            model, params = load_checkpoint(
                folder,
                self.dtype,
                quantization=self.quantization,
                experts=self.experts,
                linear=self.linear,
                mesh=self.placement.mesh,
            )
        except CheckpointError as error:
            raise WeightsError("weights", str(folder), str(error)) from error
        if model != self.model:
            raise WeightsError("weights", str(folder), "must have the config of the model that the engine runs")
        lay_out(params, linear=self.linear, experts=self.expert_panels)
        return params

    def _converted(self, arrays: dict[str, Any]) -> Iterator[tuple[str, Array]]:
        shapes = param_shapes(self.model, self.dtype)
        table = {name: Source((TensorPart(name, shape.shape),)) for name, shape in shapes.items()}
        if not arrays.keys() <= shapes.keys():
            arrays, table = self._checkpoint_table(arrays)
        _require_arrays(table, arrays)
        for name in table:
            form = self._stored_only(name)
            if form is not None:
                limit = f"is held {form}, to which jswa does not round: start the engine with quantization = none"
                raise WeightsError("weights", name, limit)
        for name, source in table.items():
            parts = [self._placed(arrays[part.key]) for part in source.parts]
            whole = assemble_arrays(source, parts, shapes[name].shape, jnp.dtype(shapes[name].dtype))
            yield from self._formed(name, whole).items()

    def _checkpoint_table(self, arrays: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Source]]:
        """Return the arrays by canonical name, without those that the decoder never reads, and the sources."""
        named: dict[str, Any] = {}
        for name, array in arrays.items():
            canonical = canonical_name(name)
            if canonical in named:
                raise WeightsError("weights", name, f"must be given once, and another name of {canonical} was")
            if canonical is not None:
                named[canonical] = array
        for name in unused_names(self.model, named):
            del named[name]
        if self.model.tie_embeddings and _HEAD in named:
            head = named.pop(_HEAD)
            if head is not named.setdefault(_EMBED, head) and not _same(head, named[_EMBED]):
                raise WeightsError("weights", _HEAD, f"must equal {_EMBED}: the model that the engine runs ties them")
        return named, sources(self.model, named)

    def _placed(self, array: Any) -> jax.Array:
        """Return an array on the engine's devices, all of it on each."""
        mesh, sample = self.placement.mesh, next(iter(self.held.values()))
        everywhere = NamedSharding(mesh, PartitionSpec()) if mesh is not None else sample.sharding  # type: ignore[no-untyped-call]
        return put_whole(array, everywhere)

    def _formed(self, name: str, whole: jax.Array) -> Params:
        """Return a parameter in shards, quantized and in panels as the engine holds it."""
        found: Params = {name: self.placement.spread(name, whole)}
        if name not in self.held:
            eight = self._eight_bits(name)
            assert eight is not None
            found = reformat(name, found, self.placement, _KINDS[eight.dtype.name], self.experts)
        # Panels are filled by numpy, on a CPU alone: its memory is the host's, whatever a trainer's guard forbids.
        with jax.transfer_guard("allow"):
            lay_out(found, linear=self.linear, experts=self.expert_panels)
        return found

    def _stored_only(self, name: str) -> str | None:
        """Return the form in which a matrix is held if jswa does not round to it, else None."""
        if f"{name}.{BLOCK_SCALES}" in self.held:
            return "in e4m3 with scales of blocks"
        eight_bits = self._eight_bits(name) is not None
        if eight_bits and f"{name}.{SCALES}" in self.held:
            return "in int8 with scales of groups"
        return None if eight_bits or name in self.held else "in 4 bits"

    def _eight_bits(self, name: str) -> jax.ShapeDtypeStruct | None:
        """Return the values of a matrix that is held in 8 bits."""
        codes = (self.held.get(f"{name}{field}") for field in _CODES)
        return next((array for array in codes if array is not None), None)

    def _require_held(self, params: Params) -> Params:
        """Assert that the parameters have the forms of the engine's, and that none is left out but scales of KV."""
        for name, array in params.items():
            if name not in self.held:
                raise WeightsError("weights", name, "must be a parameter that the engine has")
            held = self.held[name]
            assert (array.shape, array.dtype) == (held.shape, held.dtype), f"{name}: {array.shape} {array.dtype}"
        left = [name for name in self.held if name not in params and not name.endswith(".kv.scales")]
        if left:
            raise WeightsError("weights", left[0], "must be among the new weights")
        return params


def held_shapes(params: Mapping[str, Array]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shape, dtype and sharding of the parameters of the base model."""
    base = without_adapters(params)
    return {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)  # type: ignore[no-untyped-call]
        for name, value in base.items()
    }


def _handed_over(file: Path) -> dict[str, Any]:
    """Return the arrays of a file. Raises WeightsError."""
    try:
        return dict(read_handed_over(file))
    except CheckpointError as error:
        raise WeightsError("weights", str(file), str(error)) from error


def _named_arrays(source: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield names and arrays; those of a tree are the keys on the way, with dots between. Raises WeightsError."""
    if isinstance(source, Iterator | list | tuple):
        seen = set[str]()
        for name, array in source:
            if name in seen:
                raise WeightsError("weights", name, "must be given once")
            seen.add(name)
            yield name, array
        return
    for path, array in jax.tree_util.tree_flatten_with_path(source)[0]:
        yield jax.tree_util.keystr(path, simple=True, separator="."), array


def _require_arrays(table: Mapping[str, Source], arrays: Mapping[str, Any]) -> None:
    """Raise WeightsError unless the arrays are all that the sources name, in their shapes."""
    wanted = {part.key: part.shape for source in table.values() for part in source.parts}
    for name in wanted:
        if name not in arrays:
            raise WeightsError("weights", name, "must be among the new weights")
    for name, array in arrays.items():
        if name not in wanted:
            raise WeightsError("weights", name, "must be a tensor of the model that the engine runs")
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise WeightsError("weights", name, f"must be an array, not {type(array).__name__}")
        if tuple(array.shape) != wanted[name]:
            raise WeightsError("weights", name, f"has the shape {tuple(array.shape)}: must have {wanted[name]}")
        if array.dtype not in _FLOATS:
            limit = f"has the type {array.dtype}: must have one of {', '.join(one.name for one in _FLOATS)}"
            raise WeightsError("weights", name, limit)


def _same(one: Any, other: Any) -> bool:
    return one.shape == other.shape and bool((jnp.asarray(one) == jnp.asarray(other)).all())
