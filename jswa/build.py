"""Builds an engine from a checkpoint and options: weights, memory, programs. Hosts that only follow build the same."""

import dataclasses
import hashlib
import json
import logging
import os
import weakref
from pathlib import Path
from typing import IO, NamedTuple, Never

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jswa.architecture import ModelConfig
from jswa.cache.disk.records import Geometry
from jswa.cache.disk.store import DiskStore, lock_folder
from jswa.cache.disk.texts import DiskCache
from jswa.cache.layout import KVLayout
from jswa.cache.view import geometry_of
from jswa.cluster.hosts import Hosts, join
from jswa.cluster.rank import find_member
from jswa.config import EngineConfig, Limits, disk_folder, resolve_limits
from jswa.engine import Engine
from jswa.env import Switches, flags_for_autotuning, flags_for_compiling
from jswa.errors import ConfigError, RequestError
from jswa.exec.adapters import AdapterRoom
from jswa.exec.backends import choose_backends, computes_rows_alone, for_model
from jswa.exec.compile.store import open_store
from jswa.exec.host.memory import host_contents, with_host_memory
from jswa.exec.host.pages import HostPages
from jswa.exec.mesh import make_mesh
from jswa.exec.programs.drafts.models import PREFIX
from jswa.exec.runner import Runner
from jswa.exec.sizing import (
    claim_memory,
    free_bytes,
    gpu_step,
    require_memory,
    require_room,
    scratch_bytes,
    size_arena,
    table_bytes,
)
from jswa.model.drafters.load import check_drafter, load_drafter
from jswa.model.drafters.seam import Drafter
from jswa.model.hf.config import load_config
from jswa.model.hf.quantization import parse_quantization
from jswa.model.panels import lay_out, require_form
from jswa.model.partition import shard_config
from jswa.model.transformer import Params
from jswa.model.weights.converted import is_converted
from jswa.model.weights.load import dummy_checkpoint, holds_mxfp4, load_checkpoint
from jswa.model.weights.lora_files import HostAdapter, LoraReader, check_adapters, empty_room, load_adapters
from jswa.model.weights.placement import Placement
from jswa.model.weights.safetensors_files import weights_fingerprint
from jswa.plan.trace import write_header
from jswa.running.adapters import Adapters
from jswa.storage import persist
from jswa.storage.hub import find_model
from jswa.storage.json_object import read_object
from jswa.text.speculation import parse
from jswa.updates.staging import WeightsStager, held_shapes
from jswa.version import __version__
from pallas_kernels.ptxas import find_ptxas, prefer_packaged

_log = logging.getLogger("jswa")
_MIB = 2**20
_DISK_BYTES = 16 * _MIB  # that a step copies for the disk, each way: a few milliseconds


class Built(NamedTuple):
    """The parts of an engine. `model` is the whole model; `layout` and `runner` are of one device's part."""

    model: ModelConfig
    limits: Limits
    layout: KVLayout
    runner: Runner
    adapters: Adapters
    lora_reader: LoraReader | None
    stager: WeightsStager


def build_engine(folder: Path, options: EngineConfig) -> Engine:
    """Load a checkpoint, size the arena and compile every bucket. Raises ModelError or ConfigError.

    With several hosts it returns on the first host only. The other hosts run what the first host launches, and exit
    with it by SystemExit.
    """
    disk = disk_folder(options.disk_kv)
    lock = None if disk is None else lock_folder(disk[0])  # at once: loading weights may take minutes
    try:
        return _build_engine(folder, options, lock)
    except BaseException:
        if lock is not None:
            lock.close()
        raise


def _build_engine(folder: Path, options: EngineConfig, lock: IO[bytes] | None) -> Engine:
    """Build the engine. `lock`: the open lock file of the folder of `disk_kv`, if the options name one."""
    switches = _set_up_jax(options)
    member = find_member(options, os.environ)
    hosts = None if member is None else join(member, _what_runs(folder, options))
    try:
        built = _build(folder, options, hosts, switches.compilation_cache)
        if hosts is not None and hosts.member.rank:
            _follow(built.runner, hosts)
        modules = _read_modules(built.lora_reader, options)
    except Exception:
        if hosts is not None:
            hosts.abandon()
        raise
    trace = None
    if switches.dump_plans is not None and options.host_kv_bytes:
        limit = "must be 0 with JSWA_DUMP_PLANS: a plan that needs pages of host memory cannot be replayed"
        raise ConfigError("host_kv_bytes", options.host_kv_bytes, limit)
    if switches.dump_plans is not None:
        # Line buffered: if the engine fails, the file has the steps that led there.
        trace = switches.dump_plans.open("w", encoding="utf-8", buffering=1)
        geometry = geometry_of(built.layout, built.limits.num_blocks, built.limits.max_rows)._asdict()
        write_header(trace, model=str(folder), options=dataclasses.asdict(_on_one_host(options)), geometry=geometry)
    engine = Engine(
        **built._asdict(),
        seed=options.seed,
        switches=switches,
        trace=trace,
        hosts=hosts,
        host_pages=_host_pages(built.runner),
    )
    _open_disk(engine, built, options, lock)
    for name, adapter in modules.items():
        engine.load_lora(name, adapter)
    if trace is not None:
        weakref.finalize(engine, trace.close)
    if hosts is not None:
        weakref.finalize(engine, hosts.close)
    return engine


def _host_pages(runner: Runner) -> HostPages | None:
    """Return the memory of the second prefix cache, and compile the programs that copy pages to it and back."""
    if runner.limits.host is None:
        return None
    runner.prepare_copies()
    return HostPages(runner, host_contents(runner.limits.host, runner.layout, runner.kv_dtype))


def _open_disk(engine: Engine, built: Built, options: EngineConfig, lock: IO[bytes] | None) -> None:
    """Give the second prefix cache of an engine the files behind it, if the options name a folder."""
    found, host, memory = disk_folder(options.disk_kv), engine.scheduler.cache.host, built.limits.host
    if found is None or host is None or memory is None:
        return
    layout, runner = built.layout, built.runner
    bits = persist.bits_of(built.limits)
    identity = persist.identity(built.model, runner.params, layout, runner.kv_dtype, "", deterministic=bits)
    geometry = Geometry(
        hashlib.sha256(json.dumps(identity).encode()).hexdigest(),
        layout.page_size,
        layout.pages_per_block,
        layout.num_lanes * layout.devices,
        layout.block_elems // layout.pages_per_block,
        np.dtype(runner.kv_dtype),
    )
    store = DiskStore(*found, geometry, lock=lock)
    host.disk = DiskCache(host.tier, store, _DISK_BYTES // geometry.slot_bytes, memory.seconds_per_token)
    weakref.finalize(engine, store.close)


def check_model(folder: Path, options: EngineConfig) -> None:
    """Check what config.json alone tells: that jswa can run the model, and that its weights fit on the devices.

    With several hosts the memory is not checked, since they have not joined yet. Raises ModelError or ConfigError.
    """
    load_config(folder)
    if find_member(options, os.environ) is None:
        _set_up_jax(options)
        make_mesh(options.tensor_parallel_size)
        _require_memory(folder, options, jax.local_devices()[0])


def _require_memory(folder: Path, options: EngineConfig, device: jax.Device) -> None:
    """Raise ConfigError if the weights are larger than the memory; not for a converted checkpoint.

    `jswa convert --quantization` leaves config.json as it was, so the config of such a folder names the larger form.
    """
    if is_converted(folder):
        return
    stored = parse_quantization(read_object(folder / "config.json"))
    require_memory(load_config(folder), stored, options, _dtype(options, device).name, device)


def _set_up_jax(options: EngineConfig) -> Switches:
    """Set what jax reads when it starts; return the debug switches of the environment."""
    switches = Switches.read()
    flags = flags_for_compiling(os.environ.get("XLA_FLAGS", ""))
    if switches.autotune_results is not None:
        flags = flags_for_autotuning(switches.autotune_results, flags)
    os.environ["XLA_FLAGS"] = flags
    claim_memory(options.gpu_memory_utilization)
    return switches


def _dtype(options: EngineConfig, device: jax.Device) -> jnp.dtype:
    """Return the type of weights and activations."""
    automatic = "bfloat16" if device.platform == "gpu" else "float32"
    return jnp.dtype(automatic if options.dtype == "auto" else options.dtype)


def _follow(runner: Runner, hosts: Hosts) -> Never:
    """Run what the first host launches, and exit with it."""
    _log.info("host %d is ready", hosts.member.rank)
    with hosts.outlive_signal():
        runner.follow(hosts.received())
    hosts.close()
    raise SystemExit(0)


def _build(folder: Path, options: EngineConfig, hosts: Hosts | None, cache: Path | None) -> Built:
    """Build the parts of an engine; every host builds them for its own devices."""
    mesh = make_mesh(options.tensor_parallel_size, options.nnodes)
    device = jax.local_devices()[0]
    on_gpu = device.platform == "gpu"
    if on_gpu or hosts is not None:
        use_compilation_cache(cache)
    dtype = _dtype(options, device)
    kv_dtype = dtype if options.kv_cache_dtype == "auto" else jnp.dtype("float8_e4m3fn")
    capability = getattr(device, "compute_capability", None)
    sms = getattr(device, "core_count", None) if on_gpu else None
    if on_gpu:
        prefer_packaged()
    compiler = find_ptxas() if on_gpu else None
    mxfp4 = holds_mxfp4(folder, options.quantization)
    backends = choose_backends(options, dtype, device.platform, capability, sms, compiler, mxfp4=mxfp4)
    _require_memory(folder, options, device)
    mode, forms = options.quantization, (backends.linear, backends.experts == "cpu")
    room, declared = options.lora_room, load_config(folder)
    found = check_adapters(options.adapters, declared, *room[1:] if room is not None else ())
    drafts = _find_drafter(folder, options, declared)
    if options.load_format == "dummy":
        model, params = dummy_checkpoint(
            folder, dtype, options.seed, quantization=mode, experts=backends.experts, mesh=mesh
        )
    else:
        model, params = load_checkpoint(
            folder, dtype, quantization=mode, experts=backends.experts, linear=forms[0], mesh=mesh
        )
    drafter, own = (None, {}) if drafts is None else drafts.load(model, params, dtype, mesh)
    for found_params in (params, own):
        lay_out(found_params, linear=forms[0], experts=forms[1])
    require_form(params, backends.linear)
    stager = WeightsStager(model, dtype, Placement(model, mesh), held_shapes(params), mode, backends.experts, *forms)
    params |= {f"{PREFIX}{name}": value for name, value in own.items()}
    adapters = load_adapters([] if room is not None else found, model, dtype, mesh)
    params |= adapters.params if room is None else empty_room(model, room, dtype, mesh)
    if hosts is not None and adapters.digests:
        hosts.require_same("lora_modules", adapters.digests)
    whole = model
    limits = resolve_limits(options, model, on_gpu=on_gpu)
    model = model.at_length(limits.max_model_len)
    backends = for_model(backends, options, model, kv_dtype)
    part = shard_config(model, options.tensor_parallel_size)
    drafter = drafter and drafter.shard(options.tensor_parallel_size)
    layout = KVLayout.of(part, limits.page_size, () if drafter is None else drafter.layers)
    devices = _own_devices(device, mesh) if on_gpu else []
    one_bucket = limits.one_bucket and not computes_rows_alone(backends, params, part)
    limits = dataclasses.replace(limits, one_bucket=one_bucket)
    limits = _of_gpu(options, whole, part, layout, limits, kv_dtype.itemsize, devices, hosts)
    _log.info("kernels: attention %s, experts %s, linear %s", backends.attention, backends.experts, backends.linear)
    memory = options.kv_cache_memory_bytes
    if memory is None:
        scratch = scratch_bytes(part, params, layout, limits, backends, kv_dtype) if on_gpu else 0
        tables = table_bytes(part, layout, limits) if on_gpu else 0
        memory = free_bytes(_own_devices(device, mesh)) - scratch - tables
        if hosts is not None:
            memory = hosts.least(memory // _MIB) * _MIB
    limits = size_arena(limits, layout, options, memory, kv_dtype.itemsize, on_gpu=on_gpu)
    limits = with_host_memory(limits, layout, part, options, kv_dtype.itemsize, on_gpu=on_gpu)
    if on_gpu:
        require_room(limits, layout, kv_dtype.itemsize, _own_devices(device, mesh))
    broadcast = hosts.broadcast if hosts is not None and not hosts.member.rank else None
    store = None if hosts is not None else open_store(cache, _own_devices(device, mesh))
    runner = Runner(
        part,
        params,
        layout,
        limits,
        on_gpu=on_gpu,
        backends=backends,
        kv_dtype=kv_dtype,
        broadcast=broadcast,
        adapters=None if room is None else AdapterRoom(Placement(whole, mesh), room.rank, params, store),
        store=store,
        all_at_start=on_gpu or hosts is not None,
        drafter=drafter,
    )
    if on_gpu:
        runner.warm_up()
    reader = None if room is None else LoraReader(declared, whole, dtype, room.rank)
    return Built(model, limits, layout, runner, Adapters(adapters.digests, room), reader, stager)


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


def _read_modules(reader: LoraReader | None, options: EngineConfig) -> dict[str, HostAdapter]:
    """Return the adapters of `lora_modules` if they go into reserved room; else the parameters contain them."""
    modules: dict[str, HostAdapter] = {}
    if reader is None:
        return modules
    for name, folder in options.adapters.items():
        try:
            modules[name] = reader.read(folder)
        except RequestError as error:
            raise ConfigError("lora_modules", f"{name}={folder}", error.limit) from error
    return modules


def _of_gpu(
    options: EngineConfig,
    whole: ModelConfig,
    part: ModelConfig,
    layout: KVLayout,
    limits: Limits,
    itemsize: int,
    devices: list[jax.Device],
    hosts: Hosts | None,
) -> Limits:
    """Return the limits with the step of these GPUs, if there are any. All hosts have the same."""
    if not devices:
        return limits
    free = options.kv_cache_memory_bytes or free_bytes(devices)
    free = free if hosts is None else hosts.least(free // _MIB) * _MIB
    memory = int((devices[0].memory_stats() or {}).get("bytes_limit", 0))
    sizes = gpu_step(options, part, layout, free, memory, itemsize)
    return resolve_limits(options, whole, on_gpu=True, gpu_step=sizes)


def _own_devices(device: jax.Device, mesh: Mesh | None) -> list[jax.Device]:
    """Return the devices of this process that the model uses."""
    return [device] if mesh is None else list(mesh.local_devices)


def _on_one_host(options: EngineConfig) -> EngineConfig:
    return dataclasses.replace(options, nnodes=1, node_rank=None, dist_init_addr=None)


def _what_runs(folder: Path, options: EngineConfig) -> str:
    """Describe what all hosts must have in common: versions, options, config and weights, wherever the files are."""
    settings = dataclasses.replace(_on_one_host(options), lora_modules=(), download_dir=None)
    weights = "" if options.load_format == "dummy" else weights_fingerprint(folder)
    return f"{__version__} {jax.__version__} {settings} {sorted(options.adapters)} {load_config(folder)} {weights}"


def use_compilation_cache(folder: Path | None) -> None:
    """Have jax keep compiled programs in a folder; None: nowhere.

    Not on the CPUs of one host, where `exec/compile/store.py` keeps the programs: XLA cannot write the code of a CPU
    program that it has read from jax's cache.
    """
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _log.warning("compiled programs are not kept, every start compiles anew: %s", error)
        return
    settings: dict[str, object] = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        jax.config.update(name, value)  # type: ignore[no-untyped-call]
