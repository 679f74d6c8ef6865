"""One step program: its arguments, and how it is compiled ahead of time."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jswa.exec.compile.store import ProgramStore, compiled
from jswa.exec.mesh import REPLICATED, mesh_of, on_mesh, specs_of
from jswa.exec.pack import padding, unpack
from jswa.exec.programs.config import Part, StepConfig
from jswa.exec.programs.sampling.verify import ABSENT
from jswa.exec.programs.state import DeviceState
from jswa.exec.programs.step import Half, finish_half, forward_half, propose_drafts, sampling_state, step
from jswa.kernels import Kernels, refused
from jswa.model.binding import head_names, run_dtype
from pallas_kernels.errors import NoKernel

_FUNCTIONS: Mapping[Part, Callable[..., Any]] = {
    "step": step, "propose": propose_drafts, "forward": forward_half, "finish": finish_half,
}  # fmt: skip
# XLA's rematerialization counts the arena once per write, as if no write were in place. It concludes that memory is
# short, and recomputes all indices in every layer. Its CPU scheduler for concurrency widens the 16-bit weights of all
# layers to float32 before the first product; the one for memory widens each matrix when its product comes.
_SCHEDULER = "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
# A CPU's code is made by one thread: two need 10 MB more, and take both cores from the steps beside them.
# On a GPU XLA compiles each of its small kernels a second time to time both, which is half of its work: the kernels of
# a step that take time are ours, and products are tuned all the same.
_OPTIONS: dict[str, str | int | bool] = {
    "xla_disable_hlo_passes": "rematerialization",
    "xla_cpu_scheduler_type": _SCHEDULER,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_gpu_experimental_enable_fusion_autotuner": False,
}


def _options(config: StepConfig) -> dict[str, str | int | bool]:
    """Return the options of XLA for a program.

    XLA leaves out roundings to 16 bits between operations that it fuses, and what it fuses depends on the program.
    Where rows are computed alone, equal numbers must be rounded equally in programs of all shapes.
    """
    return _OPTIONS if config.kernels.sums == "xla" else {**_OPTIONS, "xla_allow_excess_precision": False}


def jit_step(config: StepConfig, params: Mapping[str, Any], state: DeviceState) -> jax.stages.Wrapped:
    """Return the jitted program of a bucket, state donated. Accepts arrays or shapes.

    Its arguments are (params, state, packed), and of a first half with drafts these. A second half gets the parameters
    of the head, the part of the state that sampling writes, and a `Half`.
    """
    run: Callable[..., Any] = partial(_FUNCTIONS[config.part], config=config)
    mesh = mesh_of(next(iter(params.values())))
    if mesh is not None:
        arguments = step_arguments(config, params, state)
        outputs = (specs_of(arguments[1]), *[REPLICATED] * (2 if config.part == "forward" else 1))
        run = on_mesh(run, mesh, arguments, outputs)
    return jax.jit(run, donate_argnums=1, compiler_options=_options(config))


def step_input(config: StepConfig, params: Mapping[str, Any]) -> Int[np.ndarray, " size"] | Half:
    """Return the third argument of a program for a step without rows, which changes nothing on the device."""
    packed = padding(config.pack)
    if config.part != "finish":
        return packed
    rows, drafts = unpack(packed, config.pack).rows, config.bucket.drafts
    hidden = jnp.zeros((len(rows), 1 + drafts, config.model.d_model), run_dtype(params))
    first, none = jnp.zeros(len(rows), jnp.int32), jnp.zeros(len(rows), bool)
    size = 0 if config.drafter is None else config.drafter.carry
    carry = jnp.zeros((*hidden.shape[:2], size), hidden.dtype) if size else None
    absent, finite = jnp.full((len(rows), drafts), ABSENT, jnp.int32), jnp.ones((len(rows), 1 + drafts), bool)
    return Half(jnp.asarray(rows), first, none, none, absent, hidden, finite, carry)


def no_drafts(config: StepConfig) -> Int[np.ndarray, "R K"]:
    """Return the drafts of a step in which no row has any."""
    return np.full((config.bucket.rows, config.bucket.drafts), ABSENT, np.int32)


def step_arguments(config: StepConfig, params: Mapping[str, Any], state: DeviceState) -> tuple[Any, ...]:
    """Return the arguments of a program, or their shapes."""
    given = step_input(config, params)
    if config.part != "finish":
        drafts = [no_drafts(config)] if config.part == "forward" and config.bucket.drafts else []
        return params, state, given, *drafts
    return {name: params[name] for name in head_names(config.model, params)}, sampling_state(state), given


def compile_step(
    config: StepConfig, params: Mapping[str, Any], state: DeviceState, store: ProgramStore | None = None
) -> jax.stages.Compiled:
    """Compile one bucket's program ahead of time, from arrays or shapes, or load it. The state is donated."""
    precision = "highest" if run_dtype(params) == jnp.float32 else "default"
    arguments = step_arguments(config, params, state)
    with jax.default_matmul_precision(precision), _unsupported(config.kernels):
        function = jit_step(config, params, state)
        return compiled(store, f"{config.part} {precision} {config}", function, arguments, str(_options(config)))


def step_scratch(config: StepConfig, params: Mapping[str, Any], state: DeviceState, store: ProgramStore | None) -> int:
    """Return the bytes of temporaries of one program, as the compiler reports them, or as the store has them."""

    def compiled_bytes() -> int:
        memory = compile_step(config, params, state).memory_analysis()
        assert memory is not None
        return int(memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes)

    if store is None:
        return compiled_bytes()
    return store.figure(
        f"scratch {config}", step_arguments(config, params, state), str(_options(config)), compiled_bytes
    )


@contextmanager
def _unsupported(kernels: Kernels) -> Iterator[None]:
    """Report a kernel that cannot serve the model as an error of `kernels`: no other kernel is chosen silently."""
    try:
        yield
    except NoKernel as error:
        raise refused(error.operation, getattr(kernels, error.operation), str(error)) from error
