"""Chooses the kernels of a device: the ones that the user names, or the default for the device."""

import importlib.util
import logging
from typing import NamedTuple

import jax.numpy as jnp

from jswa.architecture import ModelConfig
from jswa.config import EngineConfig
from jswa.errors import ConfigError
from jswa.forms.base.names import Linear, matrices_on_xla
from jswa.model.glue.products import adds_experts
from jswa.model.glue.projection import require_served
from jswa.model.glue.routing import require_routed
from jswa.model.transformer import Params
from pallas_kernels.attention.api import Implementation as Attention
from pallas_kernels.cpu import library
from pallas_kernels.errors import NoGlueKernel, NoRoutingKernel
from pallas_kernels.experts.api import Implementation as Experts
from pallas_kernels.experts.routing.api import Implementation as Routing
from pallas_kernels.glue.api import Implementation as Glue
from pallas_kernels.glue.sums import Implementation as Sums
from pallas_kernels.interpreter import interpreting
from pallas_kernels.ptxas import Ptxas
from pallas_kernels.sampling.api import MOST_TOKENS
from pallas_kernels.sampling.api import Implementation as Sampling

_log = logging.getLogger("jswa")


class Backends(NamedTuple):
    """The implementations of attention, experts, linear layers, the glue between them, sampling and routing: static.

    Attributes:
        sms: multiprocessors of the device; None: the kernels assume a number.
        sums: the implementation of sums along rows outside of these kernels.
    """

    attention: Attention = "xla"
    experts: Experts = "xla"
    sms: int | None = None
    linear: Linear = "xla"
    glue: Glue = "xla"
    sampling: Sampling = "xla"
    routing: Routing = "xla"
    sums: Sums = "xla"


PORTABLE = Backends()
# What attention runs in place of kernels that split keys by what is in a tile, if an engine is deterministic.
_WHOLE: dict[Attention, Attention] = {
    "mosaic": "mosaic_whole",
    "mosaic_splits": "mosaic_whole",
    "triton": "triton_whole",
}
# Kernels whose rows depend on nothing else in a step, by option. Of those for Hopper all are needed together.
_ALONE: tuple[dict[str, frozenset[str]], ...] = (
    {
        "attention": frozenset({"cpu"}),
        "experts": frozenset({"cpu"}),
        "linear": frozenset({"cpu"}),
        "sampling": frozenset({"cpu"}),
    },
    {
        "attention": frozenset({"mosaic_whole"}),
        "experts": frozenset({"mosaic", "mosaic_overlap"}),
        "linear": frozenset({"mosaic"}),
        "glue": frozenset({"mosaic"}),
        "sampling": frozenset({"triton", "cpu"}),
        "routing": frozenset({"xla"}),
    },
)


def choose_backends(
    options: EngineConfig,
    dtype: jnp.dtype,
    platform: str,
    capability: str | None,
    sms: int | None = None,
    compiler: Ptxas | None = None,
    *,
    mxfp4: bool = False,
) -> Backends:
    """Return the kernels to run.

    Mosaic is for Hopper and 16-bit types, Triton for other NVIDIA GPUs since Ampere, "cpu" for a CPU where its library
    is built; XLA runs anywhere. One GPU since Ampere samples on Triton. One Hopper GPU has glue on Mosaic and routing
    on Triton, unless the engine is deterministic. `for_model` says whether these can serve a model. A named kernel is
    never replaced: if it cannot serve the model, compiling it raises an error. Raises ConfigError if the package or
    library of a named kernel is missing, if "cpu" is named for a GPU or several devices, if "fp8" is named for an older
    GPU, if linear layers on Mosaic are named for another GPU than Hopper or another type than bfloat16, if attention
    that splits keys is named for a deterministic engine, and if Mosaic's compiler is known to give wrong code.

    Args:
        platform: of the device: "gpu", "cpu", …
        capability: a GPU's compute capability, such as "9.0".
        sms: a GPU's multiprocessors.
        compiler: the ptxas that compiles Mosaic's kernels.
        mxfp4: whether experts are held in MXFP4.
    """
    triton = importlib.util.find_spec("jax_triton") is not None
    named = options.attention_backend
    if named in ("triton", "triton_whole") and not triton:
        raise ConfigError("attention_backend", named, "needs jax-triton: install jswa[cuda12] or jswa[cuda13]")
    hopper = on_hopper(platform, capability, dtype)
    attention: Attention = "mosaic" if hopper else "xla"
    if platform == "gpu" and not hopper and capability is not None and float(capability) >= 8.0:
        if triton:
            attention = "triton"
        else:
            _log.warning(
                "jax-triton is not installed: attention runs on plain XLA, which is several times slower; "
                "install jswa[cuda12] or jswa[cuda13]"
            )
    if options.deterministic:
        attention = _WHOLE.get(attention, attention)
    experts: Experts = ("mosaic_overlap" if mxfp4 else "mosaic") if hopper else "xla"
    linear: Linear = "xla"
    sampling = _sampling(options, platform, capability, installed=triton)
    one = hopper and options.tensor_parallel_size == 1 and not options.deterministic
    glue: Glue = "mosaic" if one else "xla"
    routing = _routing(installed=triton) if one and options.routing_backend == "auto" else "xla"
    if platform == "cpu" and options.tensor_parallel_size == 1 and _native():
        attention, experts, linear, glue = "cpu", "cpu", "cpu", "cpu"
        sampling = "cpu" if options.deterministic else "xla"
    chosen = Backends(
        attention if named == "auto" else named,
        experts if options.moe_backend == "auto" else options.moe_backend,
        sms,
        linear if options.linear_backend == "auto" else options.linear_backend,
        glue if options.glue_backend == "auto" else options.glue_backend,
        sampling if options.sampling_backend == "auto" else options.sampling_backend,
        routing if options.routing_backend == "auto" else options.routing_backend,
    )
    chosen = chosen._replace(sums=_sums_of(chosen, options))
    for option, kernel in (
        ("moe_backend", chosen.experts),
        ("sampling_backend", chosen.sampling),
        ("routing_backend", chosen.routing),
    ):
        if kernel == "triton":
            require_triton(option, platform, capability, installed=triton, devices=options.tensor_parallel_size)
    _require_native(chosen, options, platform)
    _require_linear(chosen, dtype, platform, capability)
    if options.deterministic and chosen.attention in _WHOLE:
        limit = f"splits keys by what else a step runs: must be {_WHOLE[chosen.attention]} if deterministic = True"
        raise ConfigError("attention_backend", chosen.attention, limit)
    if platform == "gpu" and compiler is not None and compiler.is_wrong:
        _require_no_mosaic(chosen, compiler)
    return chosen


def on_hopper(platform: str, capability: str | None, dtype: jnp.dtype) -> bool:
    """Return whether a device's kernels of attention and experts are Mosaic's, if the user names no others."""
    return platform == "gpu" and capability == "9.0" and dtype.itemsize == 2


def for_model(chosen: Backends, options: EngineConfig, model: ModelConfig, kv_dtype: jnp.dtype) -> Backends:
    """Return the kernels for a model: glue, routing and sampling that cannot serve it become XLA's, if not named.

    The log says so, and why.
    """
    if options.glue_backend == "auto" and chosen.glue != "xla":
        try:
            require_served(model, chosen.glue)
        except NoGlueKernel as error:
            _log.info("norms, rotary embedding and KV writes run on plain XLA: %s", error)
            chosen = chosen._replace(glue="xla")
        if chosen.glue == "cpu" and kv_dtype.itemsize == 1:
            chosen = chosen._replace(glue="xla")
    if options.routing_backend == "auto" and chosen.routing != "xla":
        try:
            require_routed(model)
        except NoRoutingKernel as error:
            _log.info("experts are chosen by plain XLA: %s", error)
            chosen = chosen._replace(routing="xla")
    if options.sampling_backend == "auto" and chosen.sampling == "triton" and model.vocab_size > MOST_TOKENS:
        _log.info("tokens are drawn by plain XLA: a vocabulary of %d, of %d at most", model.vocab_size, MOST_TOKENS)
        chosen = chosen._replace(sampling="xla")
    return chosen


def computes_rows_alone(chosen: Backends, params: Params, model: ModelConfig) -> bool:
    """Return whether the numbers of a row depend on nothing else in its step: not on how many rows there are either.

    This is so if kernels that have this law add up all that is added along a row: the library of CPU kernels, or those
    for Hopper, in a model whose experts are added by the glue's. XLA does the rest number by number.
    """
    if not _kernels_alone(chosen):
        return False
    if chosen.linear == "cpu":
        return not matrices_on_xla(params)
    added = all(layer.moe is None or adds_experts(layer.moe) for layer in model.layers)
    return added and chosen.sums != "xla" and not matrices_on_xla(params, "mosaic")


def _kernels_alone(chosen: Backends) -> bool:
    """Return whether all kernels have rows that depend on nothing else in their step."""
    return any(all(getattr(chosen, part) in kernels for part, kernels in kinds.items()) for kinds in _ALONE)


def require_triton(option: str, platform: str, capability: str | None, *, installed: bool, devices: int) -> None:
    """Raise ConfigError if kernels that are for one GPU cannot run on Triton."""
    faults = {
        "needs jax-triton: install jswa[cuda12] or jswa[cuda13]": not installed,
        f"this device is a {platform}, compute capability {capability}: must be xla before NVIDIA's Ampere (8.0)": (
            platform != "gpu" or float(capability or 0) < 8.0
        ),
        "is for one device, and tensor_parallel_size is more: must be xla": devices > 1,
    }
    for limit, found in faults.items():
        if found:
            raise ConfigError(option, "triton", limit)


def _require_linear(chosen: Backends, dtype: jnp.dtype, platform: str, capability: str | None) -> None:
    """Raise ConfigError for products of float8 factors before Ada, and for Mosaic's but on Hopper in bfloat16."""
    device = f"this device is a {platform}, compute capability {capability}"
    if chosen.linear == "mosaic" and not (capability == "9.0" if platform == "gpu" else interpreting()):
        raise ConfigError("linear_backend", "mosaic", f"{device}: must be xla, except on NVIDIA's Hopper (9.0)")
    if chosen.linear == "mosaic" and dtype != jnp.bfloat16:
        raise ConfigError("linear_backend", "mosaic", f"dtype is {dtype.name}: must be xla, or dtype must be bfloat16")
    if chosen.linear == "fp8" and platform != "cpu" and (platform != "gpu" or float(capability or 0) < 8.9):
        raise ConfigError("linear_backend", "fp8", f"{device}: must be xla before NVIDIA's Ada (8.9)")


def _require_no_mosaic(chosen: Backends, compiler: Ptxas) -> None:
    """Raise ConfigError if a kernel on Mosaic is chosen, for which this compiler gives wrong code."""
    kernels = {
        "attention_backend": chosen.attention,
        "moe_backend": chosen.experts,
        "linear_backend": chosen.linear,
    }
    for option, kernel in kernels.items():
        if kernel.startswith("mosaic"):
            limit = f"{compiler} gives wrong code for it: install jswa[cuda13] or jswa[cuda12] anew, or choose xla"
            raise ConfigError(option, kernel, limit)


def _sums_of(chosen: Backends, options: EngineConfig) -> Sums:
    """Return the implementation of sums along rows: Triton if all other kernels of a GPU compute rows alone."""
    if chosen.sampling == "cpu":
        return "cpu"
    return "triton" if options.deterministic and chosen.sampling == "triton" and _kernels_alone(chosen) else "xla"


def _sampling(options: EngineConfig, platform: str, capability: str | None, *, installed: bool) -> Sampling:
    """Return the sampling of a device: Triton's on one GPU since Ampere, if jax-triton is installed.

    The log says if it is not.
    """
    if platform != "gpu" or float(capability or 0) < 8.0 or options.tensor_parallel_size > 1:
        return "xla"
    if not installed and options.sampling_backend == "auto":
        _log.info("jax-triton is not installed: tokens are drawn by plain XLA; install jswa[cuda12] or jswa[cuda13]")
    return "triton" if installed else "xla"


def _routing(*, installed: bool) -> Routing:
    """Return the routing of one Hopper GPU: Triton's, if jax-triton is installed; the log says if it is not."""
    if not installed:
        _log.info("jax-triton is not installed: experts are chosen by plain XLA; install jswa[cuda12] or jswa[cuda13]")
    return "triton" if installed else "xla"


def _native() -> bool:
    """Return whether the library of CPU kernels can be used; the log says why not."""
    try:
        library.digest()
    except library.NoLibrary as error:
        _log.info("plain XLA runs on this CPU, which is slower than the library of CPU kernels: %s", error)
        return False
    return True


def _require_native(chosen: Backends, options: EngineConfig, platform: str) -> None:
    """Raise ConfigError if kernels of the CPU are chosen that cannot run."""
    parts = {
        "attention_backend": chosen.attention,
        "moe_backend": chosen.experts,
        "linear_backend": chosen.linear,
        "glue_backend": chosen.glue,
        "sampling_backend": chosen.sampling,
    }
    for option, kernel in parts.items():
        if kernel != "cpu":
            continue
        if platform != "cpu":
            raise ConfigError(option, kernel, f"this device is a {platform}: must be auto or another backend")
        if options.tensor_parallel_size > 1:
            raise ConfigError(option, kernel, "is for one device, and tensor_parallel_size is more: must be xla")
        try:
            library.digest()
        except library.NoLibrary as error:
            raise ConfigError(option, kernel, f"{error}, or choose xla") from error
