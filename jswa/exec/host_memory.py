"""How much of the cache host memory holds, and when it pays to bring some of it back."""

import dataclasses
import logging
import math
import os

import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

from jswa.architecture import ModelConfig, MoeConfig
from jswa.cache.layout import KVLayout
from jswa.config import EngineConfig, HostMemory, Limits
from jswa.errors import ConfigError
from jswa.exec.programs.transfer import copy_width
from jswa.model.binding import param_shapes

_log = logging.getLogger("jswa")
_STEP_BYTES = 64 * 2**20  # that come back with one step, for each device
# Assumed where nothing is measured: what a device computes at best in prefill, and what its link to host memory carries
# of memory that is not pinned. Both make recomputing look cheap.
_FLOPS = {"gpu": 5e14, "cpu": 2e11}
_LINK_BYTES = {"gpu": 4e9, "cpu": 2e9}


def with_host_memory(
    limits: Limits, layout: KVLayout, part: ModelConfig, options: EngineConfig, itemsize: int, *, on_gpu: bool
) -> Limits:
    """Return limits with the second prefix cache that `host_kv_bytes` asks for.

    Args:
        layout, part: of one device.
        itemsize: bytes of an element of the arena.

    Raises ConfigError if the memory is not there, or is too small for a window and a page.
    """
    given = options.host_kv_bytes
    if not given:
        return limits
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if given > there:
        raise ConfigError("host_kv_bytes", given, f"this machine has {there} bytes of memory: give less")
    slab = layout.num_lanes * layout.slab_elems * itemsize * layout.devices
    slabs, least = given // slab, 2 + layout.window_pages(limits.page_size)
    if slabs < least:
        limit = f"must be at least {least * slab}, {least} slabs of {slab} bytes"
        raise ConfigError("host_kv_bytes", given, limit)
    slot, device = slab // layout.devices // layout.pages_per_slab, "gpu" if on_gpu else "cpu"
    seconds_per_token = 2 * _active(part) / _FLOPS[device]
    batches = max(1, _STEP_BYTES // (slot * copy_width(layout, itemsize)))
    host = HostMemory(
        slabs=slabs,
        slots_per_step=batches * copy_width(layout, itemsize),
        tokens_per_slot=slot / _LINK_BYTES[device] / seconds_per_token,
        seconds_per_token=seconds_per_token,
    )
    _log.info(
        "host memory for the prefix cache: %.2f GiB, %.1f times the arena; a slot comes back if that saves %.2f tokens",
        given / 2**30, slabs / limits.num_slabs, host.tokens_per_slot,
    )  # fmt: skip
    return dataclasses.replace(limits, host=host)


def slot_contents(slots: int, layout: KVLayout, dtype: np.dtype) -> list[Shaped[np.ndarray, "slots elems"]]:
    """Return memory for slots, by lane and in each lane by device. It takes what is written to it."""
    shape = (slots, layout.slab_elems // layout.pages_per_slab)
    return [np.empty(shape, dtype) for _ in range(layout.num_lanes * layout.devices)]


def _active(part: ModelConfig) -> float:
    """Return the parameters of a device that a token passes, those of all experts by the share that it is routed to."""
    feeds = [layer.mlp if layer.side is None else layer.side.moe for layer in part.layers]
    shares = [feed.top_k / feed.num_experts for feed in feeds if isinstance(feed, MoeConfig)]
    total = 0.0
    for shape in param_shapes(part, jnp.dtype("bfloat16")).values():
        total += math.prod(shape.shape) * (max(shares, default=1.0) if len(shape.shape) == 3 else 1.0)
    return total
