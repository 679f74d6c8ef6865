"""The parts of an engine: from a checkpoint and options to weights, sizes and a runner that has compiled its programs.

Four stages, each of which needs those before: the devices and the kernels to run on them; what is loaded; how large
everything is; the runner.
"""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jswa.architecture import ModelConfig
from jswa.building.images import open_sight
from jswa.building.machine import Machine, find_machine
from jswa.cache.layout import KVLayout
from jswa.cluster.hosts import Hosts
from jswa.config import EngineConfig, Limits, resolve_limits
from jswa.errors import ConfigError
from jswa.exec.adapters import AdapterRoom
from jswa.exec.compile.store import ProgramStore, open_store
from jswa.exec.host_memory import with_host_memory
from jswa.exec.programs.drafts.models import DRAFTER_PREFIX
from jswa.exec.runner import Runner
from jswa.exec.served import computes_rows_alone
from jswa.exec.sizing import (
    free_bytes,
    gpu_step,
    require_room,
    scratch_bytes,
    size_arena,
    table_bytes,
)
from jswa.forms.layouts import lay_out, require_form
from jswa.kernels import Kernels
from jswa.model.drafters.load import check_drafter, load_drafter
from jswa.model.drafters.seam import Drafter
from jswa.model.hf.config import load_config
from jswa.model.partition import shard_config
from jswa.model.transformer import Params
from jswa.model.vision.encoder import Sight
from jswa.model.weights.load import dummy_checkpoint, load_checkpoint
from jswa.model.weights.lora import files as lora_files
from jswa.model.weights.lora.files import LoraReader
from jswa.model.weights.placement import Placement
from jswa.running.adapters import Adapters
from jswa.running.staging import WeightsStager, held_shapes
from jswa.speculation import parse
from jswa.stages import LOG
from jswa.storage.hub import find_model

_MIB = 2**20


class Built(NamedTuple):
    """The parts of an engine. `model` is the whole model; `layout` and `runner` are of one device's part."""

    model: ModelConfig
    limits: Limits
    layout: KVLayout
    runner: Runner
    kernels: Kernels
    adapters: Adapters
    lora_reader: LoraReader | None
    stager: WeightsStager
    sight: Sight | None


class _Loaded(NamedTuple):
    """What is on the devices before the arena.

    Attributes:
        declared: the model as config.json declares it.
        model: the same with what the weights tell.
        params: those of the drafter and of adapters too.
        drafter: of the whole model.
    """

    declared: ModelConfig
    model: ModelConfig
    params: Params
    drafter: Drafter | None
    adapters: lora_files.AdapterWeights
    stager: WeightsStager
    sight: Sight | None


class _Sized(NamedTuple):
    """How large everything is; `part`, `layout` and `drafter` are of one device's part."""

    model: ModelConfig
    part: ModelConfig
    drafter: Drafter | None
    layout: KVLayout
    limits: Limits


def build_parts(folder: Path, options: EngineConfig, hosts: Hosts | None, cache: Path | None) -> Built:
    """Build the parts of an engine; every host builds them for its own devices. Raises ModelError or ConfigError.

    Args:
        cache: the folder of compiled programs; None: none are kept.
    """
    machine = find_machine(folder, options, hosts, cache)
    _describe(load_config(folder), machine)
    loaded = _load(folder, options, machine, hosts)
    store = None if hosts is not None else open_store(cache, machine.devices)
    sized = _size(options, machine, loaded, hosts, store)
    runner = _runner(options, machine, loaded, sized, hosts, store)
    room = options.lora_room
    reader = None if room is None else LoraReader(loaded.declared, loaded.model, machine.dtype, room)
    adapters = Adapters(loaded.adapters.digests, room)
    return Built(
        sized.model, sized.limits, sized.layout, runner, machine.kernels, adapters, reader, loaded.stager, loaded.sight
    )


def _describe(model: ModelConfig, machine: Machine) -> None:
    """Log the model, its type and the kernels that run it."""
    count, kind = len(machine.devices), machine.device.device_kind
    devices = kind if count == 1 else f"{count} x {kind}"
    LOG.info("model: %s, %d layers, in %s on %s", model.family, len(model.layers), machine.dtype.name, devices)
    LOG.info("kernels: %s", ", ".join(f"{operation} {name}" for operation, name in machine.kernels.table().items()))


def _load(folder: Path, options: EngineConfig, machine: Machine, hosts: Hosts | None) -> _Loaded:
    """Load the weights, and those of the drafter and the adapters; all headers are checked before the first weight."""
    dtype, mesh, mode, kernels = machine.dtype, machine.mesh, machine.mode, machine.kernels
    forms = kernels.linear, kernels.experts == "cpu"
    room, declared = options.lora_room, load_config(folder)
    found = lora_files.check_adapters(options.adapters, declared, *() if room is None else (room,))
    drafts = _find_drafter(folder, options, declared)
    if options.load_format == "dummy":
        model, params = dummy_checkpoint(
            folder, dtype, options.seed, quantization=mode, experts=kernels.experts, mesh=mesh
        )
    else:
        model, params = load_checkpoint(
            folder, dtype, quantization=mode, experts=kernels.experts, linear=forms[0], mesh=mesh
        )
    drafter, own = (None, {}) if drafts is None else drafts.load(model, params, dtype, mesh)
    for found_params in (params, own):
        lay_out(found_params, linear=forms[0], experts=forms[1])
    require_form(params, kernels.linear)
    stager = WeightsStager(model, dtype, Placement(model, mesh), held_shapes(params), mode, kernels.experts, *forms)
    params |= {f"{DRAFTER_PREFIX}{name}": value for name, value in own.items()}
    adapters = lora_files.load_adapters([] if room is not None else found, model, dtype, mesh, kernels.experts)
    params |= adapters.params if room is None else lora_files.empty_room(model, room, dtype, mesh, kernels.experts)
    if hosts is not None and adapters.digests:
        hosts.require_same("lora_modules", adapters.digests)
    # Only the first host gets requests.
    sight = None if hosts is not None and hosts.member.rank else open_sight(folder, options, dtype)
    return _Loaded(declared, model, params, drafter, adapters, stager, sight)


def _size(
    options: EngineConfig, machine: Machine, loaded: _Loaded, hosts: Hosts | None, store: ProgramStore | None
) -> _Sized:
    """Decide the steps, the arena and the host's memory."""
    on_gpu, params, itemsize = machine.on_gpu, loaded.params, machine.kv_dtype.itemsize
    kernels = machine.kernels
    limits = resolve_limits(options, loaded.model, on_gpu=on_gpu)
    model = loaded.model.at_length(limits.max_model_len)
    part = shard_config(model, options.tensor_parallel_size, options.decode_context_parallel_size)
    drafter = loaded.drafter and loaded.drafter.shard(options.tensor_parallel_size)
    layout = KVLayout.of(part, limits.page_size, () if drafter is None else drafter.layers)
    one_bucket = limits.one_bucket and not computes_rows_alone(kernels, params, part)
    limits = dataclasses.replace(limits, one_bucket=one_bucket)
    if on_gpu:
        limits = _of_gpu(options, loaded.model, part, layout, itemsize, machine.devices, hosts)
    memory = options.kv_cache_memory_bytes
    if memory is None:
        scratch = scratch_bytes(part, params, layout, limits, kernels, machine.kv_dtype, store) if on_gpu else 0
        tables = table_bytes(part, layout, limits) if on_gpu else 0
        sight = 0 if loaded.sight is None or not on_gpu else loaded.sight.encoder.scratch_bytes
        memory = free_bytes(machine.devices) - scratch - tables - sight
        if hosts is not None:
            memory = hosts.least(memory // _MIB) * _MIB
    limits = size_arena(limits, layout, options, memory, itemsize, on_gpu=on_gpu)
    limits = with_host_memory(limits, layout, part, options, itemsize, on_gpu=on_gpu)
    if on_gpu:
        require_room(limits, layout, itemsize, machine.devices)
    return _Sized(model, part, drafter, layout, limits)


def _runner(
    options: EngineConfig,
    machine: Machine,
    loaded: _Loaded,
    sized: _Sized,
    hosts: Hosts | None,
    store: ProgramStore | None,
) -> Runner:
    """Allocate the arena and compile the programs; on a GPU check and warm up all kernels."""
    room, params = options.lora_room, loaded.params
    runner = Runner(
        sized.part,
        params,
        sized.layout,
        sized.limits,
        on_gpu=machine.on_gpu,
        kernels=machine.kernels,
        kv_dtype=machine.kv_dtype,
        broadcast=hosts.broadcast if hosts is not None and not hosts.member.rank else None,
        adapters=None if room is None else AdapterRoom(Placement(loaded.model, machine.mesh), room.rank, params, store),
        store=store,
        all_at_start=hosts is not None or (machine.on_gpu and bool(sized.limits.step_sizes)),
        drafter=sized.drafter,
    )
    if machine.on_gpu:
        runner.warm_up()
    return runner


class _Drafts(NamedTuple):
    """A drafter with weights that fits the model: its method and its folder."""

    method: str
    folder: Path

    def load(self, model: ModelConfig, params: Params, dtype: jnp.dtype, mesh: Mesh | None) -> tuple[Drafter, Params]:
        return load_drafter(self.method, self.folder, model, params, dtype, mesh=mesh)


def _find_drafter(folder: Path, options: EngineConfig, model: ModelConfig) -> _Drafts | None:
    """Return the drafter with weights that the options name, if they name one. Raises ConfigError or ModelError.

    No weight is read.
    """
    speculation = parse(options.speculative_config)
    if speculation is None or speculation.looks_up:
        return None
    if speculation.model is not None:
        folder = find_model(speculation.model, download_dir=options.download_dir)
    drafter = check_drafter(speculation.method, folder, model)
    if speculation.tokens > drafter.most:
        limit = f"must be at most {drafter.most}, what the drafter gives"
        raise ConfigError("speculative_config.num_speculative_tokens", speculation.tokens, limit)
    drafter.shard(options.tensor_parallel_size)
    KVLayout.of(model, 1 if options.block_size is None else options.block_size, drafter.layers)
    return _Drafts(speculation.method, folder)


def _of_gpu(
    options: EngineConfig,
    whole: ModelConfig,
    part: ModelConfig,
    layout: KVLayout,
    itemsize: int,
    devices: list[jax.Device],
    hosts: Hosts | None,
) -> Limits:
    """Return the limits with the step of these GPUs. All hosts have the same."""
    free = options.kv_cache_memory_bytes or free_bytes(devices)
    free = free if hosts is None else hosts.least(free // _MIB) * _MIB
    memory = int((devices[0].memory_stats() or {}).get("bytes_limit", 0))
    sizes = gpu_step(options, part, layout, free, memory, itemsize)
    return resolve_limits(options, whole, on_gpu=True, gpu_step=sizes)
