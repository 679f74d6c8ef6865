"""The identity of KV in files, both of saved caches and of the disk: what must be equal for it to be valid."""

import dataclasses
import hashlib
import json
from typing import Any

import jax
import numpy as np

from jswa.architecture import ModelConfig
from jswa.cache.disk.records import RecordGeometry
from jswa.cache.keys import root_key
from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.model.lora import without_adapters
from jswa.model.transformer import Params

_VERSION = 2  # of what a row holds
_SAMPLES = 64

Identity = dict[str, str]


def identity(
    model: ModelConfig,
    params: Params,
    layout: KVLayout,
    dtype: np.dtype,
    limits: Limits,
    salt: str = "",
    adapter: str = "",
) -> Identity:
    """Return the facts that must be equal for KV to be valid, in the order of comparison.

    Args:
        adapter: digest of the LoRA adapter that the texts ran with, if any. Other adapters are ignored.
    """
    own = {"adapter": adapter} if adapter else {}
    parts = 1 if layout.full is None else layout.full.parts
    shared = {"decode_context_parallel_size": str(parts)} if parts > 1 else {}
    return {
        "version": str(_VERSION),
        "dtype": str(dtype),
        "page_size": str(layout.page_size),
        "tensor_parallel_size": str(layout.devices),
        **shared,
        "model": _sha256(repr(model).encode()),
        "weights": weights_digest(without_adapters(params)),
        "layout": repr(dataclasses.replace(layout, layers=())),
        "deterministic": _bits_of(limits),
        **own,
        "salt": _sha256(root_key(salt, adapter or None).encode(errors="surrogatepass")),
    }


def record_geometry(facts: Identity, layout: KVLayout, dtype: np.dtype) -> RecordGeometry:
    """Return the sizes of the records of an engine, and the digest of their identity."""
    return RecordGeometry(
        digest_of(facts),
        layout.page_size,
        layout.pages_per_slab,
        layout.num_lanes * layout.devices,
        layout.slab_elems // layout.pages_per_slab,
        np.dtype(dtype),
    )


def digest_of(facts: Identity) -> str:
    """Return the identity of a record."""
    return _sha256(json.dumps(facts).encode())


def weights_digest(params: Params) -> str:
    """Return a digest of names, shapes, types and up to 64 evenly spaced elements of every parameter."""
    digest = hashlib.sha256()
    # Sample shard by shard: no device ever holds a whole parameter.
    samples = jax.device_get({name: [_sample(x.data) for x in _shards(value)] for name, value in params.items()})
    for name, value in sorted(params.items()):
        digest.update(f"{name} {value.shape} {value.dtype}\n".encode())
        for sample in samples[name]:
            digest.update(np.asarray(sample).tobytes())
    return digest.hexdigest()


def _bits_of(limits: Limits) -> str:
    """Return the further conditions of the KV's bits if the engine is deterministic, else an empty string."""
    if not limits.deterministic:
        return ""
    # The shape of the step, if there is one, and the compiler.
    shape = f"{limits.max_rows} rows, {limits.max_tokens} tokens" if limits.one_bucket else "rows alone"
    return f"{shape}, jax {jax.__version__}, {jax.devices()[0].device_kind}"


def _shards(value: jax.Array) -> list[Any]:
    """Return the shards of an array without replicas."""
    return [shard for shard in value.addressable_shards if shard.replica_id == 0]


@jax.jit
def _sample(value: jax.Array) -> jax.Array:
    flat = value.reshape(-1)
    return jax.lax.slice(flat, [0], [flat.size], [max(1, -(-flat.size // _SAMPLES))])


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
