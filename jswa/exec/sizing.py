"""How much memory the KV arena gets: the rest beside the weights and the temporaries of the steps."""

import dataclasses
import logging
import os
from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp

from jswa.architecture import ModelConfig
from jswa.cache.capacity import ideal_fraction, padding, row_capacity, rows_held, too_little, useful_slabs
from jswa.cache.layout import KVLayout
from jswa.config import GPU_STEP, EngineConfig, Limits
from jswa.errors import ConfigError
from jswa.exec.buckets import Bucket, bucket_table, in_units
from jswa.exec.compile.limiter import side_by_side, together
from jswa.exec.compile.program import step_scratch
from jswa.exec.compile.store import ProgramStore
from jswa.exec.mesh import mesh_of
from jswa.exec.pack import PackSpec
from jswa.exec.programs.config import StepConfig
from jswa.exec.programs.sampling.verify import logits_at_once
from jswa.exec.programs.state import state_bytes, state_shapes
from jswa.forms.base.names import ENDS, LINEAR
from jswa.forms.eight_bits import EIGHT_BITS
from jswa.forms.mxfp4 import MXFP4
from jswa.kernels import Kernels
from jswa.model.binding import param_shapes
from jswa.model.hf.quantization import Quantization
from jswa.model.lora import has_adapters
from jswa.model.partition import shard_config
from jswa.model.transformer import Params
from jswa.model.weights.formats import QuantizationMode
from jswa.model.weights.held_bytes import form_of, matrix_bytes, schemes_told
from jswa.model.weights.lora.files import room_bytes
from jswa.ribs.table import VARIANTS, WIDEST
from jswa.stages import LOG, stage
from pallas_kernels import Linear
from pallas_kernels.experts.api import Implementation as Experts

_log = logging.getLogger("jswa")
_CPU_ARENA_BYTES = 4 * 2**30
# Requests of max_model_len for which a CPU has room at least, twice those of the default of max_num_seqs: the prefix
# cache keeps what does not run. Its memory is written at the start, which takes a second for 2 GiB.
_CPU_REQUESTS = 32
_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
_GIB = 2**30
_LARGE_GPU = 110 * 10**9  # bytes: nine tenths of 140 GB are more, all of an H100 are less
_ROW_TOKENS = 2_048  # of a row that has to fit beside the others
_ROWS_SHARE = 0.9  # of the arena; the rest is for the windows of chunks, and scratch
_MIXTURE_TOKENS = 8_192
_SLOW = "each is compiled to see what it takes, unless an earlier start has kept the figure"
SLACK = 0.02  # of the device's share, for fragmentation, programs and copies of pages


def require_memory(
    model: ModelConfig,
    stored: Quantization | None,
    options: EngineConfig,
    mode: QuantizationMode,
    dtype: str,
    device: jax.Device,
    kernels: Kernels,
    *,
    tower: Callable[[str], int] | None = None,
) -> None:
    """Raise ConfigError if the weights alone are larger than the memory of a device. Needs no weight file.

    Args:
        stored: how the checkpoint stores quantized weights.
        mode: how they are held.
        kernels: that run them, as far as these decide how they are held.
        tower: the bytes of the vision tower in a type; None: the engine reads no images.
    """
    shares = options.tensor_parallel_size
    part, room = shard_config(model, shares, options.decode_context_parallel_size), options.lora_room

    def size_in(dtype: str) -> int:
        size = jnp.dtype(dtype).itemsize
        adapters = 0 if room is None else room_bytes(model, room, size, shares, kernels.experts)
        seen = 0 if tower is None else tower(dtype)  # whole on the first device
        return weight_bytes(part, stored, mode, dtype, kernels.experts, kernels.linear) + adapters + seen

    size = size_in(dtype)
    if device.platform == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit, where = memory * options.nnodes // shares, "this machine"
    else:
        limit, where = int((device.memory_stats() or {}).get("bytes_limit", size)), str(device.device_kind)
    and_room = "" if room is None else " and the room for adapters"
    if size > limit:
        on = "1 device" if shares == 1 else f"{shares} devices"
        half = "" if dtype != "float32" else f"--dtype bfloat16 ({shares * size_in('bfloat16') / _GIB:.1f} GiB), "
        blind = "--language-model-only, " if tower is not None and tower(dtype) else ""
        raise ConfigError(
            "model",
            model.family,
            f"its weights{and_room} take {shares * size / _GIB:.1f} GiB in {dtype} on {on}, and {where} has "
            f"{limit / _GIB:.1f} GiB for each: choose {half}{blind}a smaller model, --quantization int8, or more "
            "devices with --tensor-parallel-size",
        )


def weight_bytes(
    part: ModelConfig,
    stored: Quantization | None,
    mode: QuantizationMode,
    dtype: str,
    experts: Experts = "xla",
    linear: Linear = "xla",
) -> int:
    """Return the bytes of the parameters that one device holds, as far as the config tells.

    Args:
        stored: how the checkpoint stores quantized weights. Matrices with a scale per tensor or row stay in 8 bits,
            packed integers of 4 bits and experts in MXFP4 in 4; others are held in `dtype`.
        mode: the option `quantization`.
        experts, linear: the kernels. Those of Hopper that unpack weights while they multiply keep matrices in float8
            with scales of blocks too, and have a scale for each 32 inputs of packed integers; "mosaic" and "triton"
            have stored experts but those in MXFP4 widened, unless the mode names 8 bits.
    """
    kept = None if mode == "none" else stored
    rounded = mode in ("int8", "fp8")
    packed = mode == "mxfp4" or (kept is not None and kept.mxfp4_experts)
    shapes = param_shapes(part, jnp.dtype(dtype))
    known = kept is not None and not (packed and kept.schemes is None)
    schemes = schemes_told(part, kept, shapes) if known and kept is not None and not rounded else {}
    total = 0
    for name, one in shapes.items():
        linear_layer, is_stack = LINEAR.search(name), len(one.shape) == 3
        if packed and linear_layer and is_stack:  # whatever the mode names
            total += MXFP4.nbytes(name, one.shape)
        elif rounded and (linear_layer or name in ENDS):
            total += EIGHT_BITS.nbytes(name, one.shape)
        else:
            total += matrix_bytes(name, one, schemes.get(name), experts if is_stack else linear)
    return total


def unpacked_by_default(model: ModelConfig, stored: Quantization) -> bool:
    """Return whether all stacks of experts are stored so that "mosaic_overlap" is their default on Hopper."""
    stacks = {name: one.shape for name, one in param_shapes(model, jnp.dtype(jnp.bfloat16)).items() if one.ndim == 3}
    schemes = {} if stored.mxfp4_experts else schemes_told(model, stored, stacks)
    held = [MXFP4 if stored.mxfp4_experts else form_of(schemes.get(name)) for name in stacks]
    return bool(stacks) and all(form.unpacked(*stacks[name][1:]) for name, form in zip(stacks, held, strict=True))


def claim_memory(share: float) -> None:
    """Make jax use this share of each GPU's memory, unless the environment sets another or jax has started."""
    if not any(os.environ.get(name) for name in _FRACTIONS):
        os.environ[_FRACTIONS[0]] = str(share)


def free_bytes(devices: Collection[jax.Device]) -> int:
    """Return the bytes left on each device beside the weights; on CPU a quarter of memory, at most 4 GiB in all.

    No more than its largest free block, since every lane of the arena lies in one. Raises ConfigError if a device does
    not tell its memory.
    """
    if all(device.platform == "cpu" for device in devices):
        return min(_CPU_ARENA_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4) // len(devices)

    def free(device: jax.Device) -> int:
        stats = device.memory_stats() or {}
        if not {"bytes_limit", "bytes_in_use"} <= stats.keys():
            allocator = os.environ.get(_ALLOCATOR)
            cause = f": the allocator that {_ALLOCATOR}={allocator} names has no limit" if allocator else ""
            raise ConfigError(
                "kv_cache_memory_bytes",
                None,
                f"must be given: {device.platform} does not report its memory{cause}, so jswa cannot tell what is free",
            )
        left = int(stats["bytes_limit"] * (1 - SLACK)) - int(stats["bytes_in_use"])
        block = largest_block(device)
        used, limit = stats["bytes_in_use"] / _GIB, stats["bytes_limit"] / _GIB
        _log.info("%s: %.2f of %.2f GiB in use, largest free block %.2f GiB", device, used, limit, block / _GIB)
        if block < left:
            _log.warning("%.2f GiB in smaller free blocks are left out of the KV arena", (left - block) / _GIB)
        return min(left, block)

    return min(map(free, devices))


def largest_block(device: jax.Device) -> int:
    """Return the bytes that one allocation on a GPU can have; what is free, if its allocator does not tell.

    XLA's allocator ("best fit with coalescing") has one pool, unless XLA_PYTHON_CLIENT_PREALLOCATE=false lets it grow:
    then what it has not claimed yet counts too.
    """
    stats = device.memory_stats() or {}
    limit = int(stats["bytes_limit"])
    block = int(stats.get("largest_free_block_bytes", 0)) or limit - int(stats["bytes_in_use"])
    return max(block, limit - int(stats.get("pool_bytes", limit)))


def require_room(limits: Limits, layout: KVLayout, itemsize: int, devices: Collection[jax.Device]) -> None:
    """Raise ConfigError if the arena does not fit on one of these GPUs, or one of its lanes into no free block."""
    lane = limits.num_slabs * layout.slab_elems * itemsize
    for device in devices:
        stats = device.memory_stats() or {}
        if not {"bytes_limit", "bytes_in_use"} <= stats.keys():
            continue
        block, left = largest_block(device), int(stats["bytes_limit"]) - int(stats["bytes_in_use"])
        _log.info(
            "%s: %d lanes of %.2f GiB into %.2f GiB, largest free block %.2f GiB",
            device,
            layout.num_lanes,
            lane / _GIB,
            left / _GIB,
            block / _GIB,
        )
        if lane > block or layout.num_lanes * lane > left:
            raise ConfigError(
                "kv_cache_memory_bytes",
                layout.num_lanes * lane,
                f"{device} has {left} bytes free, {block} of them in its largest block, and the KV arena is "
                f"{layout.num_lanes} lanes of {lane} bytes: give less, or leave the option out",
            )


def gpu_step(
    options: EngineConfig, model: ModelConfig, layout: KVLayout, room: int, memory: int, itemsize: int
) -> tuple[int, int]:
    """Return rows and tokens of a step on a GPU where the options leave them open, and say so in the log.

    Weights are read once per step, so more rows are more tokens per second as long as the arena holds them. Experts get
    few rows each in a chunk of 2,048 tokens: four times as many read their weights a quarter as often.

    Args:
        room: bytes for the arena.
        memory: bytes of a GPU that jax may use.
    """
    rows, tokens = GPU_STEP
    if memory >= _LARGE_GPU:
        slot = layout.slab_bytes(itemsize) / layout.pages_per_slab
        row = slot * layout.resident_slots(min(_ROW_TOKENS, model.max_position))
        rows = next((count for count in (1_024, 512) if count * row <= _ROWS_SHARE * room), rows)
        tokens = _MIXTURE_TOKENS if any(layer.moe for layer in model.layers) else tokens
        if options.max_num_batched_tokens is not None and options.max_num_seqs is None:
            rows = min(rows, max(GPU_STEP[0], options.max_num_batched_tokens))
        _log.info(
            "a GPU of %.0f GiB: up to %d rows and %d tokens in a step, unless max_num_seqs and max_num_batched_tokens "
            "say otherwise; a row of %d tokens takes %.1f MiB",
            *(memory / _GIB, rows, tokens, _ROW_TOKENS, row / 2**20),
        )
    return rows, tokens


def scratch_bytes(
    model: ModelConfig,
    params: Params,
    layout: KVLayout,
    limits: Limits,
    kernels: Kernels,
    kv_dtype: jnp.dtype,
    store: ProgramStore | None = None,
) -> int:
    """Return the bytes of temporaries of the largest steps of all variants, as the compiler reports them.

    These are one of prompts, one of decode rows, and those with drafts of `most_logits`.

    They do not depend on the size of the arena, so the steps are compiled with an arena of two slabs.

    Args:
        store: keeps the figures for later starts.
    """
    smallest = dataclasses.replace(limits, num_slabs=2)
    state = state_shapes(layout, smallest, model.vocab_size, kv_dtype, mesh_of(next(iter(params.values()))))
    table = bucket_table(limits, on_gpu=True, tail=model.has_tail)
    held = table[-1] if limits.one_bucket else None
    rows = in_units(limits.max_rows)
    largest = held or Bucket(limits.max_tokens, rows, decode=False)
    cases = [(largest, WIDEST)]
    if held is None:
        drawn = VARIANTS[WIDEST].finish
        cases.append((Bucket(rows, rows, decode=True), drawn))
        cases += [(bucket, drawn) for bucket in most_logits(table, model.vocab_size // model.devices)]
    found: dict[int, int] = {}

    def measure(number: int) -> None:
        bucket, variant = cases[number]
        spec = PackSpec.of(
            bucket,
            page_size=limits.page_size,
            max_rows=limits.max_rows,
            section=VARIANTS[variant].every,
            adapters=has_adapters(params),
        )
        config = StepConfig(model, layout, bucket, spec, kernels, variant, speculation=limits.speculation)
        found[number] = step_scratch(config, params, state, store)
        done(1)

    with stage("memory of steps", len(cases), f"{len(cases)} measured", slow=_SLOW) as done:
        side_by_side(range(len(cases)), measure, together())
    most = max(found.values())
    _log.info("steps take %.2f GiB of scratch", most / 2**30)
    return most


def most_logits(buckets: tuple[Bucket, ...], vocab: int) -> list[Bucket]:
    """Return the buckets with drafts among which is the one that needs most scratch.

    Of decode buckets it is the one with most logits at once, which need not be that of most rows and drafts
    (`logits_at_once`). Of those that run prompts too it may also be the one with most tokens.
    """

    def size(bucket: Bucket) -> tuple[int, int]:
        return logits_at_once(bucket.rows, bucket.per_row, vocab, bucket.tokens), bucket.tokens

    decoding = [bucket for bucket in buckets if bucket.drafts and bucket.decode]
    mixed = [bucket for bucket in buckets if bucket.drafts and not bucket.decode]
    found = [max(kind, key=size) for kind in (decoding, mixed) if kind]
    return list(dict.fromkeys([*found, *mixed[-1:]]))


def table_bytes(model: ModelConfig, layout: KVLayout, limits: Limits) -> int:
    """Return the bytes of the state beside the arena, on each device: page tables and logits state of all rows."""
    state = state_shapes(layout, dataclasses.replace(limits, num_slabs=1), model.vocab_size, jnp.dtype(jnp.int8))
    size = state_bytes({**state, "lanes": []})
    _log.info("page tables and logits state of %d rows take %.2f GiB", limits.max_rows, size / 2**30)
    return size


def size_arena(
    limits: Limits, layout: KVLayout, options: EngineConfig, memory: int, itemsize: int, *, on_gpu: bool = False
) -> Limits:
    """Choose the number of slabs; shorten an open max_model_len to what fits. Raises ConfigError.

    With a prefix cache the arena takes all of its memory. On a CPU, whose memory others share, it has room for
    `_CPU_REQUESTS` of max_model_len, or for all rows if they are more, unless the user names its memory.

    Args:
        memory: bytes for the arena, on each device.
    """
    if not on_gpu and memory > (there := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")):
        limit = f"this machine has {there} bytes of memory: give less, or leave the option out"
        raise ConfigError("kv_cache_memory_bytes", memory, limit)
    num_slabs = memory // layout.slab_bytes(itemsize)
    if not limits.prefix_cache:
        num_slabs = min(num_slabs, useful_slabs(layout, limits))
    elif options.kv_cache_memory_bytes is None and not on_gpu:
        kept = dataclasses.replace(limits, max_rows=max(_CPU_REQUESTS, limits.max_rows))
        num_slabs = min(num_slabs, useful_slabs(layout, kept))
    total_slots = (num_slabs - 1) * layout.pages_per_slab
    capacity = row_capacity(layout, limits, total_slots) if num_slabs > 1 else 0
    if capacity < (options.max_model_len or 2):
        raise too_little(layout, limits, options.max_model_len, memory=memory, itemsize=itemsize, capacity=capacity)
    if capacity < limits.max_model_len:
        _log.warning("max_model_len: %d, what the KV memory holds, not %d", capacity, limits.max_model_len)
    limits = dataclasses.replace(limits, max_model_len=min(limits.max_model_len, capacity), num_slabs=int(num_slabs))
    _log_capacity(limits, layout, itemsize)
    return limits


def _log_capacity(limits: Limits, layout: KVLayout, itemsize: int) -> None:
    slots, most = (limits.num_slabs - 1) * layout.pages_per_slab, limits.max_model_len
    gib = limits.num_slabs * layout.slab_bytes(itemsize) / _GIB
    each = "" if layout.devices == 1 else f" on each of {layout.devices} devices"
    lengths = sorted({min(length, most) for length in (2_048, 32_768, most)})
    held = ", or ".join(f"{rows_held(layout, slots, length):,} requests of {length:,} tokens" for length in lengths)
    LOG.info("KV cache: %.2f GiB%s, room for %s; %d requests run at once", gib, each, held, limits.max_rows)
    ideal = ", ".join(f"{ideal_fraction(layout, length):.0%} at {length}" for length in lengths)
    _log.debug("%d slabs, padding %.1f %%, of the ideal %s", limits.num_slabs, 100 * padding(layout), ideal)
