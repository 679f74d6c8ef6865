"""Compile steps of models that several H200 share, on any machine; check and print the program that each device runs.

    .venv-gpu/bin/python -m tools.aot.parallel [--only NAME] [--write]

Checked: two sums over devices per layer, in full layers whose tokens devices share two collectives more, and none among
the indices; the state is updated in place, no copy
is as large as a lane, and the arguments have as many bytes as `jswa capacity` counts, within 3 %. Nothing may be worse
than in gates/parallel.json, which `--write` writes: collectives outside of layers, kernels in a layer, and thunks that
the host launches.
"""

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.exec.buckets import Bucket
from jswa.exec.compile.program import jit_step
from jswa.exec.mesh import REPLICATED
from jswa.exec.pack import PackSpec
from jswa.exec.programs.config import StepConfig
from jswa.exec.programs.state import state_bytes, state_shapes
from jswa.exec.sizing import weight_bytes
from jswa.forms.base.names import BLOCK_SCALES, INT4_TILES, OUTPUTS_FIRST, TILES
from jswa.kernels import Kernels
from jswa.model.collectives import AXIS
from jswa.model.hf.config import parse_config
from jswa.model.hf.quantization import Quantization, parse_quantization
from jswa.model.partition import shard_config
from jswa.model.weights.formats import QuantizationMode
from jswa.model.weights.placement import Placement
from jswa.speculation import PROGRAMS, Speculation
from pallas_kernels import Linear
from pallas_kernels.experts.eight_bits import DEEP, TILE
from tools import gates
from tools.aot import device
from tools.aot.facts import copies, launches, top_level
from tools.aot.measures.programs import collectives
from tools.cases.held_weights import GROUP, Held, held_shapes
from tools.cases.hub_configs import CONFIGS

BFLOAT16 = jnp.dtype("bfloat16")
KV_BYTES = 40 * 10**9  # on each device
PAGE = 64
GATES = "parallel.json"
_TOLERANCE = 0.03  # relative, of the bytes that capacity counts


@dataclass(frozen=True)
class Spec:
    """A step of a model's first layers on several devices.

    Attributes:
        tokens: of a prefill step; rows of a decode step.
        drafts: of each row of a decode step on average (rows share the places), or of a row at most beside prompts.
        quantization: of the weights. mxfp4: of the experts alone, in tiles. int4: packed integers (`W4A16`), in tiles.
        linear: the implementation of linear layers.
        context: devices that share the tokens of full layers.
    """

    model: str
    devices: int
    layers: int
    tokens: int = 64
    decode: bool = True
    hosts: int = 1
    drafts: int = 0
    quantization: Held = "none"
    linear: Linear = "xla"
    context: int = 1

    @property
    def name(self) -> str:
        """The name in the output."""
        kind = f"{self.tokens} rows" if self.decode else f"prefill {self.tokens}"
        hosts = "" if self.hosts == 1 else f" of {self.hosts} hosts"
        more = f", {self.drafts} drafts" * bool(self.drafts)
        more += f", {self.quantization}" * (self.quantization in ("fp8", "fp8_blocks", "int4"))
        more += f", linear layers on {self.linear}" * (self.linear != "xla")
        more += f", tokens shared by {self.context}" * (self.context > 1)
        return f"{self.model} on {self.devices}{hosts}, {self.layers} layers{more}, {kind}"


_MODELS = (
    Spec("gemma-3-27b", 2, 6),
    Spec("gpt-oss-120b", 2, 2, quantization="mxfp4"),
    Spec("Llama-4-Scout", 4, 4),
    Spec("MiMo-V2-Flash/V2.5", 8, 6),
)
SPECS = (
    *_MODELS,
    *(replace(spec, tokens=2048, decode=False) for spec in _MODELS[:2]),
    replace(_MODELS[3], devices=16, hosts=2),
    replace(_MODELS[0], drafts=1),
    replace(_MODELS[0], tokens=2048, decode=False, drafts=7),
    replace(_MODELS[0], quantization="fp8", linear="fp8"),
    replace(_MODELS[3], quantization="fp8"),
    replace(_MODELS[0], quantization="int4", linear="mosaic"),
    replace(_MODELS[3], devices=4, layers=3, quantization="fp8_blocks", linear="mosaic"),
    Spec("gemma-3-1b", 2, 7, context=2),
    replace(_MODELS[3], layers=7, context=2),
    replace(_MODELS[3], layers=7, context=2, tokens=2048, decode=False),
    Spec("gemma-4-26B-A4B", 8, 7, context=4),
)
_WEIGHTS = {"type": "int", "num_bits": 4, "symmetric": True, "strategy": "group", "group_size": GROUP}
W4A16 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS}},
    "ignore": ["lm_head"],
}


@dataclass(frozen=True)
class Facts:
    """A compiled step, as one of the devices runs it.

    Attributes:
        by_layer: collectives in each layer, on average.
        others: collectives elsewhere, by kind and scope. Those of sampling are in branches that few steps take.
        arguments, counted: gigabytes of weights and state, as compiled and as `jswa capacity` counts them.
        temporaries: bytes.
        host: thunks that the host launches, by kind.
        in_layer: kernels of the last layer but one.
        seconds: to trace, lower and compile.
    """

    name: str
    by_layer: float
    others: dict[str, int]
    arguments: float
    counted: float
    temporaries: int
    host: dict[str, int]
    in_layer: int
    seconds: float
    faults: list[str]

    @property
    def figures(self) -> dict[str, float]:
        """What gates compare."""
        others, host = sum(self.others.values()), sum(self.host.values())
        return {"collectives_outside": others, "in_layer": self.in_layer, "graphs": host}


def h200s(devices: int, hosts: int = 1) -> Mesh:
    """Return a mesh of H200s, in hosts of eight."""
    shape, target = f"1x{hosts}x8", device.TARGET.read_text()
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology=shape)
    return Mesh(np.array(topology.devices[:devices]), (AXIS,))


def compile_shared(spec: Spec) -> Facts:
    """Compile a step. The same program runs on each device."""
    mesh, raw = h200s(spec.devices, spec.hosts), CONFIGS[spec.model]
    whole = parse_config(raw, weights=False)
    whole = replace(whole, layers=whole.layers[: spec.layers])
    part = shard_config(whole, spec.devices, spec.context)
    layout = KVLayout.of(part, PAGE)
    bucket, blocks = bucket_of(spec), KV_BYTES // layout.slab_bytes(2)
    drafting = Speculation("suffix", bucket.drafts).of_length(whole.max_position) if bucket.drafts else None
    sizes = whole.max_position, bucket.rows, bucket.tokens
    limits = Limits(*sizes, page_size=PAGE, num_slabs=blocks, speculation=drafting)
    pack = PackSpec.of(bucket, page_size=PAGE, max_rows=bucket.rows)
    kernels = Kernels("mosaic", "mosaic", device.SMS, spec.linear)
    config = StepConfig(part, layout, bucket, pack, kernels, speculation=drafting)
    where, held = Placement(whole, mesh), held_shapes(whole, spec.quantization, spec.linear)
    params: Any = {name: _placed(where, name, shape) for name, shape in held.items()}
    state = state_shapes(layout, limits, whole.vocab_size, BFLOAT16, mesh)
    upload = jax.ShapeDtypeStruct((config.pack.size,), jnp.int32, sharding=NamedSharding(mesh, REPLICATED))  # type: ignore[no-untyped-call]
    begin = time.perf_counter()
    with device.captured():
        compiled = jit_step(config, params, state).lower(params, state, upload).compile()
    seconds = time.perf_counter() - begin
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert memory is not None
    found = collectives(text)
    inside = [scope for _, scope in found if any(part.startswith("layer_") for part in scope.split("/"))]
    others = Counter(f"{kind} in {_scope(scope)}" for kind, scope in found if scope not in inside)
    mode: QuantizationMode = "fp8" if spec.quantization in ("fp8", "fp8_blocks") else "auto"
    counted = weight_bytes(part, _stored(spec), mode, "bfloat16", linear=spec.linear) + blocks * layout.slab_bytes(2)
    faults = []
    shared = 0 if spec.context == 1 else sum(layer.attention.kind == "full" for layer in whole.layers)
    if len(inside) != 2 * (spec.layers + shared):
        faults.append(f"{len(inside)} collectives in {spec.layers} layers")
    if any("indices" in scope.split("/") for _, scope in found):
        faults.append("collectives among the indices")
    if memory.alias_size_in_bytes != state_bytes(state):
        faults.append(f"{memory.alias_size_in_bytes} of {state_bytes(state)} bytes of state are updated in place")
    lane = blocks * layout.slab_elems * 2
    faults += [f"copies {size} bytes" for size in copies(text) if size >= lane]
    if abs(memory.argument_size_in_bytes - counted) > _TOLERANCE * counted:
        faults.append(f"arguments of {memory.argument_size_in_bytes} bytes, capacity counts {counted}")
    return Facts(
        spec.name,
        len(inside) / spec.layers,
        dict(others),
        memory.argument_size_in_bytes / 1e9,
        counted / 1e9,
        memory.temp_size_in_bytes,
        dict(Counter(top_level(device.thunks("jit_step")))),
        sum(launch.layer == f"layer_{spec.layers - 2}" for launch in launches(text)),
        seconds,
        faults,
    )


def _stored(spec: Spec) -> Quantization | None:
    """Return how a checkpoint would store such weights."""
    if spec.quantization == "int4":
        return parse_quantization({"quantization_config": W4A16})
    return Quantization("mxfp4") if spec.quantization == "mxfp4" else None


def bucket_of(spec: Spec) -> Bucket:
    """Return the step's bucket."""
    if not spec.decode:
        return Bucket(spec.tokens, 64, decode=False, drafts=spec.drafts)
    return Bucket.verifying(spec.tokens, spec.drafts, PROGRAMS[-1] if spec.drafts else 0)


def _placed(where: Placement, name: str, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return a parameter's shape with its sharding; a matrix with outputs first is cut as before it was turned.

    So are the tiles of a linear layer and their scales.
    """
    base, _, field = name.rpartition(".")
    axes, deep = {INT4_TILES: (4, TILE), TILES: (4, TILE), BLOCK_SCALES: (2, DEEP)}.get(field, (0, 0))
    tiled = len(shape.shape) == axes
    if not tiled and not name.endswith(OUTPUTS_FIRST):
        return where.shape(name, shape)
    outputs, inputs = shape.shape[:2]
    sides = (inputs * deep, outputs * TILE) if tiled else (inputs, outputs)
    before = jax.ShapeDtypeStruct(sides, shape.dtype)  # type: ignore[no-untyped-call]
    cut = where.shape(f"{base}.values", before).sharding
    assert isinstance(cut, NamedSharding)
    along, across = (*cut.spec, None, None)[:2]
    turned = NamedSharding(cut.mesh, PartitionSpec(across, along))  # type: ignore[no-untyped-call]
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=turned)  # type: ignore[no-untyped-call]


def _scope(name: str) -> str:
    known = [part for part in name.split("/") if part in ("sampling", "logprobs", "logits")]
    return known[-1] if known else "embedding"


def main() -> None:
    """Print a line per step. Exit with 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only steps whose name contains this")
    parser.add_argument("--write", action="store_true", help="write the gates anew")
    options = parser.parse_args()
    faults, figures = [], {}
    for spec in (spec for spec in SPECS if options.only in spec.name):
        facts = compile_shared(spec)
        print(
            f"{facts.name}: {facts.by_layer:g} collectives a layer, {facts.others} elsewhere, {facts.arguments:.2f} GB "
            f"of arguments (capacity {facts.counted:.2f}), {facts.temporaries / 1e6:.0f} MB of temporaries, the host "
            f"launches {facts.host}, {facts.in_layer} kernels in a layer, {facts.seconds:.0f} s",
            flush=True,
        )
        faults += [f"{facts.name}: {fault}" for fault in facts.faults]
        figures[facts.name] = facts.figures
    if options.write:
        gates.write(figures, GATES, {"jax": jax.__version__})
    sys.exit("\n".join([*faults, *gates.worse(figures, GATES)]) or None)


if __name__ == "__main__":
    main()
