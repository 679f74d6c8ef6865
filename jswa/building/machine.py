"""The first stage of an engine: the devices of this process, the kernels that run on them, and whether weights fit."""

import importlib.util
import logging
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jswa.building.images import tower_bytes
from jswa.cluster.hosts import Hosts
from jswa.config import EngineConfig
from jswa.exec.compile.ptxas import find_ptxas, prefer_packaged
from jswa.exec.mesh import make_mesh
from jswa.exec.served import what_serves
from jswa.exec.sizing import require_memory, unpacked_by_default
from jswa.kernels import DeviceFacts, Kernels, may_take_library, resolve
from jswa.model.hf.config import load_config
from jswa.model.hf.quantization import Quantization, parse_quantization, read_config
from jswa.model.weights.converted import is_converted
from jswa.model.weights.formats import QuantizationMode
from jswa.speculation import parse
from pallas_kernels.cpu import library
from pallas_kernels.cpu.build import CannotBuild
from pallas_kernels.cpu.first_use import provide
from pallas_kernels.interpreter import interpreting

_log = logging.getLogger("jswa")
_SLOWER = "plain XLA runs, several times slower than the CPU kernels"


class Machine(NamedTuple):
    """The devices of this process, and what runs on them.

    Attributes:
        devices: those that the model uses.
        mode: how weights are held.
    """

    mesh: Mesh | None
    device: jax.Device
    devices: list[jax.Device]
    on_gpu: bool
    dtype: jnp.dtype
    kv_dtype: jnp.dtype
    mode: QuantizationMode
    kernels: Kernels


def find_machine(folder: Path, options: EngineConfig, hosts: Hosts | None, cache: Path | None) -> Machine:
    """Find the devices, and choose the kernels. Raises ConfigError, also if the weights do not fit.

    Args:
        cache: the folder of compiled programs; None: none are kept.
    """
    mesh = make_mesh(options.tensor_parallel_size, options.nnodes)
    device = jax.local_devices()[0]
    on_gpu = device.platform == "gpu"
    if on_gpu or hosts is not None:
        use_compilation_cache(cache)
    if on_gpu:
        prefer_packaged()
    mode, kernels = choose(folder, options, device)
    require_weights(folder, options, device, mode, kernels)
    devices = [device] if mesh is None else list(mesh.local_devices)
    types = dtype_of(options, device), kv_dtype_of(options, device)
    return Machine(mesh, device, devices, on_gpu, *types, mode, kernels)


def choose(folder: Path, options: EngineConfig, device: jax.Device) -> tuple[QuantizationMode, Kernels]:
    """Return how weights are held, and the kernels to run. Raises ModelError or ConfigError."""
    converted = is_converted(folder)
    stored = None if converted else parse_quantization(read_config(folder))
    mode = _mode(options, stored, converted=converted)
    model = load_config(folder)
    # A converted checkpoint's config.json names the form that it had.
    packed = mode == "mxfp4" or (mode == "auto" and stored is not None and unpacked_by_default(model, stored))
    types = dtype_of(options, device), kv_dtype_of(options, device)
    held = mode in ("auto", "none", "mxfp4") and not converted and (stored is None or stored.method == "mxfp4")
    drafts = parse(options.speculative_config)
    plain = held and not options.adapters and options.lora_room is None and (drafts is None or drafts.looks_up)
    served = what_serves(model, *types, plain=plain)
    return mode, resolve(options.kernels, facts_of(options, device, packed_experts=packed), served)


def facts_of(options: EngineConfig, device: jax.Device, *, packed_experts: bool = False) -> DeviceFacts:
    """Return what the choice of kernels depends on. `packed_experts`: whether experts are held in MXFP4 or NVFP4."""
    on_gpu = device.platform == "gpu"
    capability = getattr(device, "compute_capability", None) if on_gpu else None
    compiler = find_ptxas() if on_gpu else None
    facts = DeviceFacts(
        device.platform,
        None if capability is None else float(capability),
        dtype_of(options, device).name,
        options.tensor_parallel_size,
        getattr(device, "core_count", None) if on_gpu else None,
        packed_experts=packed_experts,
        factors_in_8_bits=options.quantization == "w8a8_fp8",
        deterministic=options.deterministic,
        has_triton=importlib.util.find_spec("jax_triton") is not None,
        wrong_compiler=str(compiler) if compiler is not None and compiler.is_wrong else "",
        interpreted=interpreting(),
    )
    return facts._replace(no_library=why_no_library()) if may_take_library(options.kernels, facts) else facts


@cache
def why_no_library() -> str:
    """Return why the library of CPU kernels cannot be used; empty if it can. It is built if there is none.

    The log says so, once in a process: it is a warning if the user can mend it.
    """
    try:
        provide(_log.warning)
        library.digest()
    except CannotBuild as error:
        level = logging.WARNING if error.remedy else logging.INFO
        _log.log(level, "%s: %s%s", _SLOWER, error.why, error.remedy and f"; to mend it, {error.remedy}")
        return error.why
    except library.NoLibrary as error:
        _log.warning("%s: %s; to mend it, delete that file", _SLOWER, error)
        return str(error)
    return ""


def _mode(options: EngineConfig, stored: Quantization | None, *, converted: bool) -> QuantizationMode:
    """Return how weights are held. Rounded activations need linear layers in fp8, stored so or rounded at load."""
    if options.quantization != "w8a8_fp8":
        return options.quantization
    in_rows = stored is not None and stored.method != "mxfp4" and not stored.blocks
    return "auto" if converted or in_rows else "fp8"


def require_weights(
    folder: Path, options: EngineConfig, device: jax.Device, mode: QuantizationMode, kernels: Kernels
) -> None:
    """Raise ConfigError if the weights are larger than the memory; not for a converted checkpoint.

    `jswa convert --quantization` leaves config.json as it was, so the config of such a folder names the larger form.
    """
    if is_converted(folder):
        return
    config_json = read_config(folder)
    stored, dtype = parse_quantization(config_json), dtype_of(options, device).name
    reads_images = not options.language_model_only and options.load_format != "dummy"
    tower = partial(tower_bytes, config_json) if reads_images else None
    require_memory(load_config(folder), stored, options, mode, dtype, device, kernels, tower=tower)


def dtype_of(options: EngineConfig, device: jax.Device) -> jnp.dtype:
    """Return the type of weights and activations."""
    automatic = "bfloat16" if device.platform == "gpu" else "float32"
    return jnp.dtype(automatic if options.dtype == "auto" else options.dtype)


def kv_dtype_of(options: EngineConfig, device: jax.Device) -> jnp.dtype:
    """Return the type of pages."""
    return dtype_of(options, device) if options.kv_cache_dtype == "auto" else jnp.dtype("float8_e4m3fn")


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
