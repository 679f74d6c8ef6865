"""Binds a flat dict of parameters to the decoder: names say how a matrix is held, shapes what a model needs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jswa.architecture import ModelConfig
from jswa.forms.base.form import Form, MatrixPlace, ScaleCounts, key_of
from jswa.forms.base.names import LINEAR
from jswa.forms.plain import PLAIN
from jswa.forms.table import ENDS_OF_ARRAYS, matrix_at
from jswa.model.altup import StreamLayer, Streams
from jswa.model.layers import Mlp, Normalize
from jswa.model.lora import with_adapters
from jswa.model.moe import Experts, Moe
from jswa.model.transformer import Decoder, Params
from pallas_kernels import Linear
from pallas_kernels.elementwise.api import Implementation as Elementwise
from pallas_kernels.elementwise.sums import Implementation as Sums
from pallas_kernels.experts.api import Implementation
from pallas_kernels.experts.routing.api import Implementation as Routing


def param_shapes(config: ModelConfig, dtype: jnp.dtype, experts: Form = PLAIN) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shape and dtype of every parameter by name, without allocating any.

    `experts` is the form of the experts' matrices, which must say all of its arrays' sizes; others are plain.
    """
    plain = shapes_of(lambda: Decoder(config, dtype, Experts(), "xla"))
    if experts is PLAIN:
        return plain
    found: dict[str, jax.ShapeDtypeStruct] = {}
    for name, one in plain.items():
        is_stack = LINEAR.search(name) and len(one.shape) == 3
        found |= _arrays(experts, name, one.shape) if is_stack else {name: one}
    return found


def _arrays(form: Form, name: str, shape: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes and types of the arrays that hold a matrix."""
    specs = form.specs(name, shape, ScaleCounts())
    assert specs is not None
    return {
        key_of(name, end): jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.kinds[0]))  # type: ignore[no-untyped-call]
        for end, spec in specs.items()
    }


def shapes_of(make: Callable[[], nnx.Module]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shape and dtype of the parameters of the module that `make` builds, without allocating any."""
    _, state = nnx.split(nnx.eval_shape(make))
    return {_name(path): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}


def run_dtype(params: Mapping[str, Any]) -> np.dtype:
    """Return the dtype of the activations: the dtype of parameters that are not quantized, such as norms."""
    others = {*ENDS_OF_ARRAYS, "selection_bias"}
    floats = (value.dtype for name, value in params.items() if name.rpartition(".")[2] not in others)
    return next(np.dtype(dtype) for dtype in floats if jnp.issubdtype(dtype, jnp.floating))


def bind(
    config: ModelConfig,
    params: Params,
    experts: Implementation = "xla",
    sms: int | None = None,
    linear: Linear = "xla",
    elementwise: Elementwise = "xla",
    routing: Routing = "xla",
    sums: Sums = "xla",
) -> Decoder:
    """Return the decoder over these parameters; called inside a jitted function, at trace time only.

    The names of the parameters say which matrices have 8 or 4 bits, and which have LoRA adapters; those with an axis
    more than the model's lie in panels.

    Args:
        experts, sms: the implementation of mixtures of experts, and its device; see `grouped_matmul`.
        linear: the implementation of the products with matrices in 16 bits on Hopper, and with an embedding that is
            the head too. Matrices in panels have the CPU's in any case, and those in tiles Hopper's.
        elementwise: the implementation of residuals, norms, rotary embedding and KV writes.
        routing: the implementation of the choice of experts.
        sums: the implementation of sums along rows outside of these. If it is not XLA, and the experts are chosen
            there, routers and head have the implementation of linear layers.
    """
    kernels = Experts(experts, sms, routing)
    alone = sums != "xla" and routing == "xla"
    made = _filled(_decoder(config, run_dtype(params), kernels, elementwise), params, None, sms, linear, alone=alone)
    return _with_sums(sums, made)


def _with_sums(sums: Sums, decoder: Decoder) -> Decoder:
    """Return the decoder after setting the implementation of sums along rows in all its modules."""
    for _, module in nnx.iter_modules(decoder):
        if isinstance(module, Decoder | Mlp | Moe | Normalize | StreamLayer | Streams):
            module.sums = sums
    return decoder


@dataclass(frozen=True)
class _Unfilled[M: nnx.Module]:
    """A module without parameters, as nnx splits it."""

    graph: nnx.GraphDef[M]
    leaves: Any  # shapes by their paths


def _split[M: nnx.Module](make: Callable[[], M]) -> _Unfilled[M]:
    graph, state = nnx.split(nnx.eval_shape(make))
    return _Unfilled(graph, nnx.to_flat_state(state))


@lru_cache(maxsize=16)
def _decoder(config: ModelConfig, dtype: jnp.dtype, experts: Experts, elementwise: Elementwise) -> _Unfilled[Decoder]:
    """Return the decoder of a model, made once: that takes 0.3 s for 62 layers, and a program needs two or three."""
    return _split(lambda: Decoder(config, dtype, experts, elementwise))


def bound[M: nnx.Module](make: Callable[[], M], params: Params) -> M:
    """Return the module that `make` builds, with its parameters by their names; called at trace time only.

    See `bind` for how a matrix may be held. The inputs of a matrix may be other than `make` says.
    """
    return _filled(_split(make), params)


def _filled[M: nnx.Module](
    module: _Unfilled[M],
    params: Params,
    names: frozenset[str] | None = None,
    sms: int | None = None,
    linear: Linear = "xla",
    *,
    alone: bool = False,
) -> M:
    """Return a module with its parameters by their names.

    Args:
        names: the parameters that there are, if some are missing; modules that lack theirs cannot be called.
        sms: multiprocessors of the device; None: as many as an H200 has.
        linear: the implementation of the products with matrices in 16 bits; other than for Hopper it is not asked.
        alone: whether it has routers and the head too.
    """

    def wanted(name: str) -> bool:
        return names is None or any(one == name or one.startswith(f"{name}.") for one in names)

    def filling(name: str, leaf: Any) -> Any:
        shape = leaf.get_value()
        if not wanted(name):
            return leaf.replace(shape)
        own = matrix_at(MatrixPlace(name, shape.shape, sms, linear, alone), params)
        return leaf.replace(with_adapters(name, own, params))

    values = {path: filling(_name(path), leaf) for path, leaf in module.leaves}
    filled: M = nnx.merge(module.graph, nnx.from_flat_state(values))
    return filled


def head_names(config: ModelConfig, params: Mapping[str, Any]) -> list[str]:
    """Return the names of the parameters that `Decoder.logits` reads."""
    head = "embed" if config.tie_embeddings else "lm_head"
    return [name for name in params if name.split(".")[0] in (head, "head_bias")]


def bind_head(
    config: ModelConfig,
    params: Params,
    dtype: jnp.dtype,
    linear: Linear = "xla",
    sums: Sums = "xla",
    sms: int | None = None,
) -> Decoder:
    """Return a decoder of which only `logits` can be called: of the parameters, those of `head_names` are enough.

    Args:
        dtype: that of the hidden states.
        linear, sums, sms: see `bind`.
    """
    names, kernels = frozenset(head_names(config, params)), Experts(sms=sms)
    made = _filled(_decoder(config, dtype, kernels, "xla"), params, names, sms, linear, alone=sums != "xla")
    return _with_sums(sums, made)


def _name(path: tuple[object, ...]) -> str:
    return ".".join(map(str, path))
