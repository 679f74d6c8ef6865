"""Lowers an engine's programs as the engine would compile them, for any configuration, without its weights."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp

from jswa.architecture import ModelConfig
from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.exec.buckets import bucket_table
from jswa.exec.compile.program import compile_step
from jswa.exec.compile.steps import StepPrograms
from jswa.exec.compile.store import ProgramStore
from jswa.exec.mesh import make_mesh
from jswa.exec.programs.config import Part
from jswa.exec.programs.drafts.models import DRAFTER_PREFIX
from jswa.exec.programs.state import Carry, DeviceState, state_shapes
from jswa.exec.programs.transfer import compile_read_slots, compile_write_slots
from jswa.exec.side_programs import (
    compile_copy_pages,
    compile_logits_state,
    compile_rename_pages,
    compile_set_masks,
    compile_set_rows,
    compile_set_texts,
)
from jswa.forms.layouts import lay_out
from jswa.forms.mxfp4 import MXFP4
from jswa.forms.plain import PLAIN
from jswa.kernels import PORTABLE, Kernels
from jswa.model.binding import param_shapes, run_dtype
from jswa.model.drafters.load import load_drafter
from jswa.model.drafters.seam import Drafter
from jswa.model.hf.config import parse_config
from jswa.model.partition import shard_config
from jswa.model.weights.formats import QuantizationMode, reformat
from jswa.model.weights.placement import Placement
from jswa.speculation import Speculation
from tools.cases.held_weights import Held, adapter_shapes, held_shapes
from tools.programs.text import ProgramText, program_text
from tools.programs.triton import uncompiled

Kind = Literal["decode", "prefill", "drafts", "propose", "forward", "finish", "sampled", "prompt", "beside"]
# The part and the variant of a program; whether its bucket is one for decode steps, and whether it has drafts.
_FAMILIES: dict[str, tuple[Part, str, bool, bool]] = {
    "decode": ("step", "none", True, False),
    "prefill": ("step", "none", False, False),
    "drafts": ("step", "none", True, True),
    "propose": ("propose", "none", True, True),
    "forward": ("forward", "none", False, False),
    "finish": ("finish", "none", True, False),
    "sampled": ("step", "logprobs", True, False),
    "prompt": ("step", "prompt_logprobs", False, False),
}


@dataclass(frozen=True)
class Configuration:
    """An engine whose programs have digests.

    Attributes:
        model: its config.json.
        kinds: of the programs. The largest bucket of each is lowered; "beside" are all programs that run between steps.
        layers: the numbers of those that are left; all if there are none.
        platform: for which programs are lowered.
        dtype, kv_bits: of activations; of numbers in pages.
        held: how the weights are held; of a CPU's engine a `QuantizationMode`.
        adapters: sum of the ranks of LoRA adapters of each linear layer.
        drafter: folder of an EAGLE-3 drafter.
        devices: that share the model.
        capability: of the GPU, for kernels on Triton.
    """

    name: str
    model: dict[str, Any]
    kinds: tuple[Kind, ...]
    layers: tuple[int, ...] = ()
    platform: Literal["cpu", "cuda"] = "cpu"
    kernels: Kernels = PORTABLE
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    kv_bits: Literal[8, 16, 32] = 16
    held: Held = "none"
    adapters: int = 0
    speculation: Speculation | None = None
    drafter: Path | None = None
    deterministic: bool = False
    experts_out: bool = False
    devices: int = 1
    capability: int = 90

    @property
    def on_triton(self) -> bool:
        """Whether some kernel is on Triton, so that jax-triton is needed."""
        return any(str(kernel).startswith("triton") for kernel in self.kernels)

    @property
    def on_library(self) -> bool:
        """Whether some kernel is in the library of CPU kernels, so that this must be built."""
        return "cpu" in self.kernels


class _Recorder(ProgramStore):
    """Takes the place of the store of compiled programs: keeps the text of each program, and compiles nothing."""

    def __init__(self, platform: str) -> None:
        self._platform = platform
        self.texts: list[ProgramText] = []

    def compiled(
        self, what: str, arguments: tuple[Any, ...], options: str, trace: Callable[[], jax.stages.Traced]
    ) -> jax.stages.Compiled:
        """Lower a program for the platform. What is returned is empty, and nobody runs it."""
        self.texts.append(program_text(trace().lower(lowering_platforms=(self._platform,)), options))
        return object.__new__(jax.stages.Compiled)


@dataclass(frozen=True)
class _Engine:
    """What an engine has when it compiles: see `StepPrograms`."""

    model: ModelConfig
    layout: KVLayout
    limits: Limits
    params: dict[str, Any]
    state: DeviceState
    drafter: Drafter | None


def lowered(wanted: Configuration) -> dict[str, ProgramText]:
    """Return the texts of a configuration's programs by name.

    Raises ConfigError if there are too few devices, and ImportError or NoLibrary if a kernel's package is missing.
    """
    engine, found = _engine(wanted), dict[str, ProgramText]()
    with uncompiled(wanted.capability):
        for kind in wanted.kinds:
            if kind == "beside":
                found |= _beside(engine, wanted.platform)
            else:
                found[kind] = _step(engine, wanted, kind)
    return found


def _engine(wanted: Configuration) -> _Engine:
    whole = parse_config(wanted.model, weights=False)
    layers = tuple(whole.layers[number] for number in wanted.layers or range(len(whole.layers)))
    whole = replace(whole, layers=layers)
    mesh, dtype = make_mesh(wanted.devices), jnp.dtype(wanted.dtype)
    params, drafter = _weights(whole, wanted), None
    if mesh is not None:
        params = {name: Placement(whole, mesh).shape(name, shape) for name, shape in params.items()}
    if wanted.drafter is not None:
        drafter, own = load_drafter("eagle3", wanted.drafter, whole, {}, dtype)  # which takes no weight of it
        lay_out(own, linear=wanted.kernels.linear, experts=wanted.kernels.experts == "cpu")
        params |= {f"{DRAFTER_PREFIX}{name}": _shape(value) for name, value in own.items()}
    model = shard_config(whole, wanted.devices)
    limits = _limits(wanted, model)
    layout = KVLayout.of(model, limits.page_size, () if drafter is None else drafter.layers)
    kv_dtype = jnp.dtype("float8_e4m3fn") if wanted.kv_bits == 8 else dtype
    carry = None if drafter is None else Carry(drafter.carry, run_dtype(params))
    state = state_shapes(layout, limits, model.vocab_size, kv_dtype, mesh, carry)
    return _Engine(model, layout, limits, params, state, drafter)


def _limits(wanted: Configuration, model: ModelConfig) -> Limits:
    on_gpu = wanted.platform == "cuda"
    rows, tokens, page, length = (64, 2_048, 64, 8_192) if on_gpu else (4, 64, 16, 512)
    speculation = wanted.speculation and wanted.speculation.of_length(length)
    return Limits(
        min(length, model.max_position),
        rows,
        tokens,
        page,
        num_slabs=1_024,
        one_bucket=wanted.deterministic,
        deterministic=wanted.deterministic,
        routed_experts=wanted.experts_out,
        speculation=speculation,
    )


def _weights(model: ModelConfig, wanted: Configuration) -> dict[str, Any]:
    """Return shapes of the weights as the engine holds them."""
    kernels, dtype = wanted.kernels, jnp.dtype(wanted.dtype)
    shapes = param_shapes(model, dtype)
    if wanted.platform == "cuda":
        held: dict[str, Any] = held_shapes(model, wanted.held, kernels.linear, kernels.experts)
    else:
        held = _on_cpu(model, wanted)
    return held | adapter_shapes(shapes, wanted.adapters)


def _on_cpu(model: ModelConfig, wanted: Configuration) -> dict[str, Any]:
    """Return shapes of the weights after an engine on a CPU has laid them out, which needs arrays: small ones."""
    kernels = wanted.kernels
    mode = cast(QuantizationMode, "none" if wanted.held == "mxfp4" else wanted.held)
    shapes = param_shapes(model, jnp.dtype(wanted.dtype), MXFP4 if wanted.held == "mxfp4" else PLAIN)
    params: dict[str, Any] = {}
    for name, shape in shapes.items():
        zeros = {name: jnp.zeros(shape.shape, shape.dtype)}
        params |= zeros if mode == "none" else reformat(name, zeros, Placement(model), mode, kernels.experts)
    lay_out(params, linear=kernels.linear, experts=kernels.experts == "cpu")
    return {name: _shape(value) for name, value in params.items()}


def _shape(value: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype)  # type: ignore[no-untyped-call]


def _step(engine: _Engine, wanted: Configuration, kind: Kind) -> ProgramText:
    """Return the text of a step's program: the one of the largest bucket of its kind."""
    part, variant, decode, drafts = _FAMILIES[kind]
    table = bucket_table(engine.limits, on_gpu=wanted.platform == "cuda", tail=engine.model.has_tail)
    programs = StepPrograms(
        engine.model,
        engine.layout,
        engine.limits,
        table,
        wanted.kernels,
        engine.params,
        engine.state,
        None,
        engine.drafter,
    )
    configs = [programs.configs[number] for number in programs.family((part, variant))]
    fitting = [one for one in configs if (one.bucket.decode, one.bucket.drafts > 0) == (decode, drafts)]
    recorder = _Recorder(wanted.platform)
    compile_step(max(fitting, key=lambda one: (one.bucket.drafts, one.bucket)), engine.params, engine.state, recorder)
    (text,) = recorder.texts
    return text


def _beside(engine: _Engine, platform: str) -> dict[str, ProgramText]:
    """Return the texts of the programs that run between steps; those of several sizes are numbered."""
    layout, state, texts = engine.layout, engine.state, engine.state["texts"]
    makers: dict[str, Callable[[ProgramStore], object]] = {
        "copy pages": lambda store: compile_copy_pages(layout, state, store),
        "rename pages": lambda store: compile_rename_pages(layout, state, store),
        "read slots": lambda store: compile_read_slots(layout, state, store),
        "write slots": lambda store: compile_write_slots(layout, state, store),
        "set rows": lambda store: compile_set_rows(state, store),
        "set logits state": lambda store: compile_logits_state(state["for_logits"], store),
        "set masks": lambda store: compile_set_masks(state["for_logits"], store),
        "set texts": lambda store: None if texts is None else compile_set_texts(texts, store),
    }
    return {name: text for maker in makers.items() for name, text in _numbered(*maker, platform)}


def _numbered(name: str, make: Callable[[ProgramStore], object], platform: str) -> Iterator[tuple[str, ProgramText]]:
    recorder = _Recorder(platform)
    make(recorder)
    for number, text in enumerate(recorder.texts, 1):
        yield name if len(recorder.texts) == 1 else f"{name} {number}", text
