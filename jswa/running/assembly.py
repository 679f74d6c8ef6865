"""Assembly of one parameter from arrays on devices, as `model.hf.assemble` does it for tensors in files."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Shaped

from jswa.model.hf.source import Fold, Source


def assemble_arrays(
    source: Source, parts: Sequence[Shaped[Array, "..."]], shape: tuple[int, ...], dtype: jnp.dtype
) -> Shaped[Array, "..."]:
    """Return a parameter of this shape and type, made of the checkpoint tensors `parts` in the order of the source.

    The result never shares memory with `parts`. The numbers are those that `model.hf.assemble.assemble` gives.
    """
    # Without names, so that all layers share a program.
    out: Shaped[Array, ...] = _assemble(source._replace(parts=()), tuple(parts), shape, dtype)
    return out


def put_whole(array: Any, everywhere: Sharding) -> Array:
    """Return an array that is whole on each device of a sharding; one on devices, in shards too, skips the host."""
    own = getattr(array, "sharding", None)
    if isinstance(own, NamedSharding) and not own.is_fully_replicated:
        array = _gather(own.mesh)(array)  # `device_put` would put the shards together on the host
    whole: Array = jax.device_put(array, everywhere)
    return whole


@lru_cache(maxsize=8)
def _gather(mesh: Mesh | AbstractMesh) -> Callable[[Array], Array]:
    """Return the program that gathers arrays on a mesh."""
    whole = NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]
    return jax.jit(lambda x: x, out_shardings=whole)


@partial(jax.jit, static_argnums=(0, 2, 3))
def _assemble(source: Source, given: tuple[Array, ...], shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    folds = source.folds if source.layout != "columns" else ()
    parts = [*map(_folded, given, folds), *given[len(folds) :]]
    out = _laid_out(source, parts).astype(dtype)
    return jnp.array(out.reshape(shape), copy=True)


def _laid_out(source: Source, parts: list[Array]) -> Array:
    if source.layout == "product":
        rotated = source.folds[0].rotated
        one, other = (part.astype(jnp.float32) for part in parts)  # a bfloat16 product would round twice
        return jnp.concatenate([one[:rotated], one[rotated:] * other[rotated:]])
    if source.layout == "columns":
        return _folded(parts[0].T, source.folds[0])
    if source.layout == "experts":
        each = [parts[at : at + source.per_expert] for at in range(0, len(parts), source.per_expert)]
        return jnp.stack([jnp.concatenate(one).T for one in each])
    if source.layout in ("transposed", "transposed_interleaved"):
        whole = jnp.concatenate([jnp.swapaxes(part, -1, -2) for part in parts], axis=-1)
        return _halves(whole) if source.layout == "transposed_interleaved" else whole
    if source.layout == "interleaved":
        return _halves(parts[0])
    stacked = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    if source.layout == "rank_slices":
        q, k, _ = (rows // source.slices for rows in source.rows)
        rows = jnp.split(stacked.reshape(source.slices, -1, *stacked.shape[1:]), [q, q + k], axis=1)
        stacked = jnp.concatenate([one.reshape(-1, *stacked.shape[1:]) for one in rows])
    return stacked.T if source.layout in ("matrix", "rank_slices") else stacked


def _halves(x: Shaped[Array, "... n"]) -> Shaped[Array, "... n"]:
    """Return x with the even entries of its last axis before the odd ones."""
    return jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)


def _folded(x: Shaped[Array, "rows ..."], fold: Fold) -> Shaped[Array, "rows ..."]:
    """Return x with the rows of each head reordered by the fold."""
    half, turned = fold.head_dim // 2, fold.rotated // 2
    rotated = [*range(turned), *range(half, half + turned)]
    rest = [*range(turned, half), *range(half + turned, fold.head_dim)]
    order = jnp.array(rotated + rest if fold.first else rest + rotated)
    return x.reshape(-1, fold.head_dim, *x.shape[1:])[:, order].reshape(x.shape)
