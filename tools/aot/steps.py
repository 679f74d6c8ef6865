"""Compile whole steps of released models for an H200: their kernels, memory and copies. See `tools.aot.hopper`."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.predict.counts import FORMATS, Formats, mixtures, touched_experts
from benchmarks.predict.step import Load, Setting, works_of
from jswa.architecture import ModelConfig
from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.exec.buckets import Bucket
from jswa.exec.compile.program import jit_step, step_arguments
from jswa.exec.pack import PackSpec
from jswa.exec.programs.config import Part, StepConfig
from jswa.exec.programs.sampling.verify import logits_at_once
from jswa.exec.programs.state import DeviceState, state_bytes, state_shapes
from jswa.forms.base.names import LINEAR, OUTPUTS_FIRST
from jswa.kernels import Kernels
from jswa.model.binding import param_shapes
from jswa.model.hf.config import parse_config
from jswa.speculation import PROGRAMS, Speculation
from tools.aot import device, triton
from tools.aot.facts import KernelFacts, Launch, copies, launches, made_sizes, top_level, widest
from tools.aot.measures import traffic
from tools.aot.measures.sums import float_sums
from tools.aot.step_specs import ROWS, StepSpec
from tools.aot.triton_facts import gpu
from tools.cases.held_weights import GROUP, Held, adapter_shapes, held_shapes
from tools.cases.hub_configs import CONFIGS

BFLOAT16 = jnp.dtype("bfloat16")
CUBLAS = 'custom_call_target="__cublas'
CUBLASLT_FP8 = "__cublas$lt$matmul$f8"
KV_BYTES = 40 * 10**9  # of the arena, whose lanes then have more than 2^31 elements
PAGE = 64
CONTEXT = 1_536  # tokens of each row, where bytes are counted
# The name of the program that each part is compiled to.
_NAMES: dict[Part, str] = {
    "step": "jit_step",
    "forward": "jit_forward_half",
    "propose": "jit_propose_drafts",
    "finish": "jit_finish_half",
}
# Bytes that a step of `ROWS` rows or fewer moves, over those that must move, at most. With more rows float32 logits and
# the parts of products weigh more: 1.24 for 256 rows of gpt-oss-20b.
MOST_MOVED = 1.15
MOST_MOVED_FACTORS = 1.2  # with factors of 8 bits: tokens are read for their largest magnitude, then rounded
# With packed integers XLA writes dense matrices in 16 bits before each product: they move more, and are temporaries.
MOST_MOVED_INTEGERS = 1.5
# Packed integers have a scale of 16 bits and a zero point of 8 for each group; those of experts for each 32 inputs.
_FORMATS: dict[Held, Formats] = {
    "none": FORMATS["bf16"],
    "mxfp4": FORMATS["mxfp4"],
    "int8": FORMATS["fp8"],
    "fp8": FORMATS["fp8"],
    "fp8_blocks": FORMATS["fp8"],
    "int4": Formats(weights=4 + 24 / GROUP, experts=4 + 24 / 32),
    "nvfp4": Formats(weights=4.5, experts=4.5),
}


@dataclass(frozen=True)
class StepFacts:
    """A compiled step.

    Attributes:
        launches: kernels per layer.
        in_layer: kernels of the last layer but one, which are its own alone.
        index_launches: kernels of the whole step that only compute indices, except in routing, sampling and its tables.
        graphs: thunks that the host launches: 1 if the whole step is one command buffer (CUDA graph).
        temporaries: bytes.
        seconds: to trace, lower and compile.
        kernels: the Mosaic kernels, each once.
        bytes_moved: by all kernels of a greedy decode step of rows of `CONTEXT`, over those that must move; 0 for steps
            that are bound by FLOP.
        logits_greedy, logits_limited: how often sampling reads or writes an array as large as the logits, of greedy
            rows and at most.
    """

    name: str
    launches: float
    in_layer: int
    index_launches: int
    graphs: int
    temporaries: int
    seconds: float
    kernels: list[KernelFacts]
    faults: list[str]
    bytes_moved: float = 0.0
    logits_greedy: int = 0
    logits_limited: int = 0

    @property
    def figures(self) -> dict[str, float]:
        """What gates compare."""
        found = {"in_layer": self.in_layer, "index_launches": self.index_launches, "graphs": self.graphs}
        moved = {"bytes_moved": self.bytes_moved} if self.bytes_moved else {}
        return {**found, **moved, "logits_greedy": self.logits_greedy, "logits_limited": self.logits_limited}


def compile_step(spec: StepSpec) -> StepFacts:
    """Compile a step, and those to compare it with: of fewer layers if the step names them, with weights of 16 bits."""
    facts = facts_of(spec)
    faults = list(facts.faults)
    if spec.shorter:
        few, many = facts_of(replace(spec, layers=spec.shorter)).index_launches, facts.index_launches
        # XLA fuses differently in longer programs. Indices that each layer computes would be as many as the layers.
        if many > few + max(1, (spec.layers - spec.shorter) // 8):
            faults.append(f"{many} index kernels with {spec.layers} layers, {few} with {spec.shorter}")
    if spec.quantization not in ("none", "int4") or (spec.quantization == "int4" and spec.linear == "mosaic"):
        plain = facts_of(replace(spec, quantization="none", experts="mosaic", linear="xla")).temporaries
        if facts.temporaries >= plain + _smallest_matrix(spec):  # less is sums of a product in float32
            faults.append(f"{facts.temporaries - plain} bytes of temporaries more than with weights of 16 bits")
    return replace(facts, faults=faults)


def _smallest_matrix(spec: StepSpec) -> int:
    """Return the bytes in 16 bits of the smallest matrix that may be quantized: of a copy that must not exist."""
    shapes = param_shapes(parse_config(CONFIGS[spec.model], weights=False), BFLOAT16)
    return min(2 * int(math.prod(shape.shape)) for name, shape in shapes.items() if LINEAR.search(name))


class Prepared(NamedTuple):
    """What a step is compiled from: its config, the shapes of parameters and state, and the program's arguments."""

    config: StepConfig
    params: dict[str, jax.ShapeDtypeStruct]
    state: DeviceState
    arguments: tuple[Any, ...]


def prepared(spec: StepSpec) -> Prepared:
    """Return what a step is compiled from, placed on an H200."""
    model = parse_config(CONFIGS[spec.model], weights=False)
    model = replace(model, layers=model.layers[: spec.layers])
    layout = KVLayout.of(model, PAGE)
    prefill = Bucket(spec.tokens, spec.rows, decode=False, drafts=spec.drafts)
    bucket = prefill if spec.tokens else Bucket.verifying(spec.rows, spec.drafts, PROGRAMS[-1] if spec.drafts else 0)
    config, state = _step_config(model, layout, bucket, spec)
    shapes = param_shapes(model, BFLOAT16)
    held = held_shapes(model, spec.quantization, spec.linear, spec.experts)
    assert spec.quantization == "none" or _bytes(held) < 0.75 * _bytes(shapes)
    params = device.on_h200({**held, **adapter_shapes(shapes, spec.adapters)})
    arguments = step_arguments(config, params, state)
    return Prepared(config, params, state, (*arguments[:2], *device.on_h200(jax.eval_shape(lambda: arguments[2:]))))


def facts_of(spec: StepSpec) -> StepFacts:
    """Compile one step, without the checks that need a second one."""
    config, params, state, arguments = prepared(spec)
    model, bucket = config.model, config.bucket
    begin = time.perf_counter()
    with device.captured() as kernels, triton.compiling_for(gpu("h200")):
        compiled = jit_step(config, params, state).lower(*arguments).compile()
    seconds = time.perf_counter() - begin
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert memory is not None
    found, outermost = launches(text), top_level(device.thunks(_NAMES[spec.part]))
    faults = [fault for facts in kernels for fault in facts.faults()]
    if memory.alias_size_in_bytes != state_bytes(arguments[1]):
        faults.append(
            f"{memory.alias_size_in_bytes} of {state_bytes(arguments[1])} bytes of state are updated in place"
        )
    faults += [f"copies {size} bytes" for size in copies(text) if size >= _lane_bytes(state)]
    faults += _eight_bit_faults(text, params)
    bound = 4 * logits_at_once(bucket.rows, 1 + bucket.drafts, model.vocab_size, bucket.tokens)
    if (largest := widest(text, model.vocab_size)) > bound:
        faults.append(f"an array of logits has {largest} bytes, and {bound} may exist at the same time")
    if bucket.decode and outermost != ["kCommandBuffer"]:
        faults.append(f"not one command buffer but {', '.join(outermost)}")
    in_layers = sum(launch.layer is not None for launch in found)
    program = traffic.parse_program(text)
    if spec.sums != "xla":
        faults += [f"XLA adds up along rows: {found}" for found in float_sums(program)]
        faults += ["XLA calls cuBLAS"] if CUBLAS in text else []
    logits = traffic.arrays_moved(program, "sampling", 4 * bucket.rows * model.vocab_size)
    moved = _bytes_moved(spec, model, program, state)
    if spec.rows <= ROWS and moved > _most_moved(spec):
        faults.append(f"moves {moved} of the bytes that must move")
    return StepFacts(
        spec.name,
        in_layers / spec.layers,
        sum(launch.layer == f"layer_{spec.layers - 2}" for launch in found),
        _index_launches(found),
        len(outermost),
        memory.temp_size_in_bytes,
        seconds,
        kernels,
        faults,
        moved,
        int(logits.least) - _untouched(spec),
        int(logits.most),
    )


def _untouched(spec: StepSpec) -> int:
    """Return how many arrays as large as the logits the kernels of sampling are given and do not touch.

    Greedy rows without constraints neither write changed logits nor read them, nor any logits, a second time.
    """
    return 3 if spec.sampling == "triton" else 0


def _most_moved(spec: StepSpec) -> float:
    """Return the bytes that a step may move, over those that must move."""
    if spec.quantization == "int4" and spec.linear == "xla":
        return MOST_MOVED_INTEGERS
    return MOST_MOVED_FACTORS if spec.linear == "fp8" else MOST_MOVED


def _eight_bit_faults(program: str, held: Mapping[str, jax.ShapeDtypeStruct]) -> list[str]:
    """Return what is wrong with the products of 8-bit factors: another kernel than cuBLASLt's, a copy of a matrix."""
    matrices = [shape for name, shape in held.items() if name.endswith(OUTPUTS_FIRST)]
    found, copied = program.count(f'custom_call_target="{CUBLASLT_FP8}"'), made_sizes(program, ("u8", "f8e4m3fn"))
    faults = [f"{found} of {len(matrices)} products are cuBLASLt's of 8 bits"] if found != len(matrices) else []
    copied &= {math.prod(matrix.shape) for matrix in matrices}
    return faults + ([f"writes 8-bit arrays as large as a matrix: {sorted(copied)}"] if copied else [])


def _bytes_moved(spec: StepSpec, model: ModelConfig, program: traffic.Program, state: DeviceState) -> float:
    """Return the bytes that a decode step's kernels move over those that must move; 0 if nothing says how many must.

    Kernels of attention read the pages of the visible keys, and those of experts the weights of the experts that have
    tokens. XLA's own kernels are counted as they were compiled, activations too, which must not move.
    """
    if spec.tokens or spec.drafts or spec.adapters or spec.part != "step":
        return 0.0
    formats = replace(_FORMATS[spec.quantization], kv=spec.kv_bits)
    works = works_of(Setting(model, formats, 0.0), Load(spec.rows, CONTEXT))
    moe, lane = next(iter(mixtures(model)), None), _lane_bytes(state)
    share = 1.0 if moe is None else float(touched_experts(moe, np.array([spec.rows]))[0]) / moe.num_experts

    def reads(array: traffic.Array) -> float:
        if array.size >= lane:
            return 0.0  # pages, which `works` counts
        weights = moe is not None and array.shape[:1] == (moe.num_experts,) and len(array.shape) > 2
        return array.size * (share if weights else 1.0)

    pages = sum(work.moved for work in works if work.scope.startswith("attention"))
    moved = traffic.bytes_moved(program, reads).least + pages - _untouched(spec) * 4 * spec.rows * model.vocab_size
    return round(moved / sum(work.least for work in works), 3)


def _bytes(params: dict[str, jax.ShapeDtypeStruct]) -> int:
    return sum(math.prod(value.shape) * value.dtype.itemsize for value in params.values())


def _step_config(
    model: ModelConfig, layout: KVLayout, bucket: Bucket, spec: StepSpec
) -> tuple[StepConfig, DeviceState]:
    kv_dtype = BFLOAT16 if spec.kv_bits == 16 else jnp.dtype("float8_e4m3fn")
    num_slabs = KV_BYTES // layout.slab_bytes(kv_dtype.itemsize)
    drafting = Speculation("suffix", bucket.drafts).of_length(model.max_position) if bucket.drafts else None
    sizes = model.max_position, bucket.rows, bucket.tokens
    limits = Limits(*sizes, page_size=PAGE, num_slabs=num_slabs, speculation=drafting)
    pack = PackSpec.of(bucket, page_size=PAGE, max_rows=bucket.rows, adapters=spec.adapters > 0)
    kernels = Kernels(
        spec.attention, spec.experts, device.SMS, spec.linear, spec.elementwise, spec.sampling, spec.routing, spec.sums
    )
    config = StepConfig(model, layout, bucket, pack, kernels, part=spec.part, speculation=drafting)
    return config, device.on_h200(state_shapes(layout, limits, model.vocab_size, kv_dtype))


def _index_launches(found: list[Launch]) -> int:
    """Count the kernels that only compute indices, without routing (part of its layer), sampling and its tables."""
    return sum(launch.integers and not {"moe", "sampling", "logits_state"} & set(launch.scope) for launch in found)


def _lane_bytes(state: DeviceState) -> int:
    return min(lane.size * lane.dtype.itemsize for lane in state["lanes"])


def printed(steps: Iterable[StepFacts]) -> Iterator[StepFacts]:
    """Yield the steps, and print a line of each as soon as it is there: all of them take an hour."""
    for index, facts in enumerate(steps):
        if not index:
            print(
                "\nkernels/layer  in a layer  index kernels  graphs  bytes moved  logits moved  temporaries, MB"
                "  seconds  step, registers"
            )
        logits = f"{facts.logits_greedy} to {facts.logits_limited}"
        registers = "/".join(str(kernel.registers) for kernel in facts.kernels)
        print(
            f"{facts.launches:13.1f}{facts.in_layer:12}{facts.index_launches:15}{facts.graphs:8}{facts.bytes_moved:13.3f}"
            f"{logits:>14}{facts.temporaries / 1e6:17.1f}{facts.seconds:9.1f}  {facts.name}; {registers}",
            flush=True,
        )
        yield facts
