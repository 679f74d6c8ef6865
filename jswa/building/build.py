"""Builds an engine from a checkpoint and options. Hosts that only follow build the same parts (`building.parts`)."""

import dataclasses
import logging
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Never

import jax

from jswa.architecture import ModelConfig
from jswa.building.kv_events import publish_kv_events
from jswa.building.machine import choose, require_weights
from jswa.building.parts import Built, build_parts
from jswa.cache.disk.store import DiskStore, lock_folder
from jswa.cache.disk.texts import DiskCache
from jswa.cache.view import geometry_of
from jswa.cluster.hosts import Hosts, join
from jswa.cluster.rank import find_member
from jswa.commands.options.sizes import folder_and_bytes
from jswa.config import EngineConfig
from jswa.engine import Engine
from jswa.env import Switches, flags_for_autotuning, flags_for_compiling
from jswa.errors import ConfigError, RequestError
from jswa.exec.host_memory import slot_contents
from jswa.exec.host_pages import HostPages
from jswa.exec.mesh import make_mesh
from jswa.exec.runner import Runner
from jswa.exec.sizing import claim_memory
from jswa.grammar.compiler import Grammars
from jswa.model.hf.config import load_config
from jswa.model.weights.lora.files import HostAdapter, LoraReader
from jswa.model.weights.safetensors_files import weights_fingerprint
from jswa.plan.trace import write_header
from jswa.stages import bars
from jswa.storage.identity import identity, record_geometry
from jswa.text.tokenizer import Tokenizer
from jswa.version import __version__

_log = logging.getLogger("jswa")
_MIB = 2**20
_DISK_BYTES = 16 * _MIB  # that a step copies for the disk, each way: a few milliseconds


def build_engine(folder: Path, options: EngineConfig, tokenizer: Tokenizer | None) -> Engine:
    """Load a checkpoint, size the arena and compile every bucket. Raises ModelError or ConfigError.

    The tokenizer tells how texts end, and what structured outputs may be; without one there are none.

    With several hosts it returns on the first host only. The other hosts run what the first host launches, and exit
    with it by SystemExit.
    """
    if tokenizer is not None:
        tokenizer.require_fit(load_config(folder).vocab_size, folder)
    disk = folder_and_bytes("disk_kv", options.disk_kv)
    lock = None if disk is None else lock_folder(disk[0])  # at once: loading weights may take minutes
    try:
        return _build_engine(folder, options, tokenizer, lock)
    except BaseException:
        if lock is not None:
            lock.close()
        raise


def _build_engine(folder: Path, options: EngineConfig, tokenizer: Tokenizer | None, lock: IO[bytes] | None) -> Engine:
    """Build the engine. `lock`: the open lock file of the folder of `disk_kv`, if the options name one."""
    switches = _set_up_jax(options)
    member = find_member(options, os.environ)
    hosts = None if member is None else join(member, _what_runs(folder, options))
    try:
        with bars(shown=options.use_tqdm_on_load):
            built = build_parts(folder, options, hosts, switches.compilation_cache)
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
        geometry = geometry_of(built.layout, built.limits.num_slabs, built.limits.max_rows)._asdict()
        write_header(trace, model=str(folder), options=dataclasses.asdict(_on_one_host(options)), geometry=geometry)
    model = _with_end_token(built.model, tokenizer)
    engine = Engine(
        **built._replace(model=model)._asdict(),
        grammars=Grammars(tokenizer, model.vocab_size, model.eos_token_ids),
        seed=options.seed,
        switches=switches,
        trace=trace,
        hosts=hosts,
        host_pages=_host_pages(built.runner),
    )
    _open_disk(engine, built, options, lock)
    _publish(engine, options)
    for name, adapter in modules.items():
        engine.load_lora(name, adapter)
    if trace is not None:
        weakref.finalize(engine, trace.close)
    if hosts is not None:
        weakref.finalize(engine, hosts.close)
    return engine


def _with_end_token(model: ModelConfig, tokenizer: Tokenizer | None) -> ModelConfig:
    """Return the model config with the tokenizer's `eos_token` among the end tokens, as in vLLM and SGLang.

    The tokenizer of a fine-tuned model often names the end of a turn, while its config still has the end of a text.
    """
    end = None if tokenizer is None else tokenizer.token_id("eos_token")
    if end is None or end in model.eos_token_ids or end >= model.vocab_size:
        return model
    return dataclasses.replace(model, eos_token_ids=(*model.eos_token_ids, end))


def _host_pages(runner: Runner) -> HostPages | None:
    """Return the memory of the second prefix cache, and compile the programs that copy pages to it and back."""
    if runner.limits.host is None:
        return None
    runner.prepare_copies()
    slots = runner.limits.host.slabs * runner.layout.pages_per_slab
    return HostPages(runner, slot_contents(slots, runner.layout, runner.kv_dtype))


def _open_disk(engine: Engine, built: Built, options: EngineConfig, lock: IO[bytes] | None) -> None:
    """Give the second prefix cache of an engine the files behind it, if the options name a folder."""
    found, host, memory = folder_and_bytes("disk_kv", options.disk_kv), engine.scheduler.cache.host, built.limits.host
    if found is None or host is None or memory is None:
        return
    layout, runner = built.layout, built.runner
    facts = identity(built.model, runner.params, layout, runner.kv_dtype, built.limits)
    geometry = record_geometry(facts, layout, runner.kv_dtype)
    store = DiskStore(*found, geometry, lock=lock)
    host.disk = DiskCache(host.tier, store, _DISK_BYTES // geometry.slot_bytes, memory.seconds_per_token)
    weakref.finalize(engine, store.close)


def _publish(engine: Engine, options: EngineConfig) -> None:
    """Publish events about the engine's cached KV, if the options ask for it; they end with the engine."""
    own = weakref.ref(engine)

    def adapters() -> Mapping[str, str]:
        engine = own()
        return {} if engine is None else engine.adapters

    close = publish_kv_events(engine.scheduler.cache, adapters, options.kv_events_config)
    if close is not None:
        weakref.finalize(engine, close)


def check_model(folder: Path, options: EngineConfig) -> None:
    """Check what config.json alone tells: that jswa can run the model, and that its weights fit on the devices.

    With several hosts the memory is not checked, since they have not joined yet. Raises ModelError or ConfigError.
    """
    load_config(folder)
    if find_member(options, os.environ) is None:
        _set_up_jax(options)
        make_mesh(options.tensor_parallel_size)
        device = jax.local_devices()[0]
        require_weights(folder, options, device, *choose(folder, options, device))


def _set_up_jax(options: EngineConfig) -> Switches:
    """Set what jax reads when it starts; return the debug switches of the environment."""
    switches = Switches.read()
    flags = flags_for_compiling(os.environ.get("XLA_FLAGS", ""))
    if switches.autotune_results is not None:
        flags = flags_for_autotuning(switches.autotune_results, flags)
    os.environ["XLA_FLAGS"] = flags
    claim_memory(options.gpu_memory_utilization)
    return switches


def _follow(runner: Runner, hosts: Hosts) -> Never:
    """Run what the first host launches, and exit with it."""
    _log.info("host %d is ready", hosts.member.rank)
    with hosts.outlive_signal():
        runner.follow(hosts.received())
    hosts.close()
    raise SystemExit(0)


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


def _on_one_host(options: EngineConfig) -> EngineConfig:
    return dataclasses.replace(options, nnodes=1, node_rank=None, dist_init_addr=None)


def _what_runs(folder: Path, options: EngineConfig) -> str:
    """Describe what all hosts must have in common: versions, options, config and weights, wherever the files are."""
    settings = dataclasses.replace(_on_one_host(options), lora_modules=(), download_dir=None)
    weights = "" if options.load_format == "dummy" else weights_fingerprint(folder)
    return f"{__version__} {jax.__version__} {settings} {sorted(options.adapters)} {load_config(folder)} {weights}"
