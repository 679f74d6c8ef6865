"""Compile the Triton kernel for NVIDIA GPUs on any machine; check and print the compilers' reports.

    .venv-gpu/bin/python -m tools.aot.triton                 all layers below, then a decode step
    .venv-gpu/bin/python -m tools.aot.triton --only gemma    only those whose name contains it
    .venv-gpu/bin/python -m tools.aot.triton --gpu l4        for one of a100 (sm_80), l4 (sm_89), h200 (sm_90a)

Checked for each kernel: no spilled registers, shared memory within limits, matrix units in use, and asynchronous copies
that run while the kernel computes. For a step also: the state is updated in place, no copy is as large as a lane, and
the whole step with all attention kernels is one command buffer (CUDA graph). The speed is not measured.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Sharding, SingleDeviceSharding

from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.exec.buckets import Bucket
from jswa.exec.pack import PackSpec
from jswa.exec.programs.config import StepConfig
from jswa.exec.programs.state import state_bytes, state_shapes
from jswa.exec.programs.step import step
from jswa.kernels import Kernels
from jswa.model.binding import param_shapes
from jswa.model.hf.config import parse_config
from pallas_kernels.attention.api import paged_attention
from pallas_kernels.attention.rows import PagedRows, QueryTiles
from tools.aot import device
from tools.aot.facts import copies, top_level
from tools.aot.triton_facts import Gpu, TritonFacts, gpu
from tools.cases.hub_configs import CONFIGS
from tools.cases.kernels.attention_layers import DECODE_LAYERS, Layer
from tools.cases.kernels.attention_shapes import arguments

_DUMPS = tempfile.TemporaryDirectory()  # removed when the process ends
os.environ["JAX_TRITON_DUMP_DIR"] = _DUMPS.name  # read when jax_triton is imported

BFLOAT16 = jnp.dtype("bfloat16")
KV_BYTES = 40 * 10**9  # of the arena, whose lanes then have more than 2^31 elements
_NAMED = {layer.name: layer for layer in DECODE_LAYERS}
_PREFILL = (
    "gemma-3-27b local",
    "gpt-oss-20b local",
    "MiMo-V2-Flash full",
    "gemma-4-31B local",
    "gemma-4-31B full",
    "Mistral-7B, page 16",
    "80/80, softcap, sinks, page 16",
)
LAYERS = (
    *(replace(layer, context=32_768) for layer in DECODE_LAYERS),
    *(replace(_NAMED[name], name=f"{name}, tiles of 32", tile=32, context=32_768) for name in _PREFILL),
    replace(_NAMED["Mistral-7B"], name="Mistral-7B, float32", dtype="float32", context=32_768),
    replace(_NAMED["Mistral-7B"], name="Mistral-7B, float32, tiles of 32", dtype="float32", tile=32, context=32_768),
    replace(_NAMED["Mistral-7B"], name="Mistral-7B, pages of 48", page_size=48, context=32_768),
)


@dataclass(frozen=True)
class StepFacts:
    """A compiled step.

    Attributes:
        launched: thunks that the host launches, by kind.
        calls: attention kernels inside of them.
        temporaries: bytes.
        seconds: to trace, lower and compile.
    """

    name: str
    launched: list[str]
    calls: int
    temporaries: int
    seconds: float
    faults: list[str]


def main() -> None:
    """Print the tables. Exit with 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only layers and steps whose name contains this")
    parser.add_argument(
        "--gpu", default=["a100", "l4"], nargs="+", help="GPUs to compile for: names of files in pallas_kernels/tuning"
    )
    parser.add_argument("--json", type=Path, help="also write the facts to this file")
    options = parser.parse_args()
    faults, written = [], []
    for name in options.gpu:
        card = gpu(name)
        print(f"{card.name + ', ' + card.arch:38}registers spills shared memory blocks/SM threads mma copies seconds")
        for layer in (layer for layer in LAYERS if options.only in layer.name):
            facts, seconds = compile_layer(layer, card)
            print_kernel(layer, facts, card, seconds)
            found = facts.faults(card, matrix_units=layer.dtype != "float32")
            faults += [f"{layer.name}, {card.name}: {fault}" for fault in found]
            written.append({"gpu": card.name, "name": layer.name, "seconds": seconds, **asdict(facts)})
    steps = [compile_step(model, gpu("a100")) for model in ("Mistral-7B-v0.1",) if options.only in model]
    for step_facts in steps:
        print_step(step_facts)
        faults += [f"{step_facts.name}: {fault}" for fault in step_facts.faults]
    if options.json:
        text = json.dumps({"jax": jax.__version__, "kernels": written, "steps": [asdict(s) for s in steps]}, indent=1)
        options.json.write_text(text + "\n")
    sys.exit("\n".join(faults) or None)


@contextmanager
def compiling_for(card: Gpu) -> Iterator[Sharding]:
    """Compile for one such GPU inside: jax-triton asks the mesh in scope for its compute capability."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=card.target, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield SingleDeviceSharding(topology.devices[0])


def compile_layer(layer: Layer, card: Gpu) -> tuple[TritonFacts, float]:
    """Compile a layer's attention. Return its kernel, and the seconds to trace, lower and compile the call."""
    with compiling_for(card) as sharding:
        given = arguments(layer, sharding)

        def attend(
            q: jax.Array, kv: jax.Array, rows: PagedRows, tiles: QueryTiles, sinks: jax.Array | None
        ) -> jax.Array:
            out: jax.Array = paged_attention(
                q,
                kv,
                rows,
                tiles,
                layer_index=given.layer_index,
                attend=given.attend,
                sinks=sinks,
                implementation="triton",
                sms=card.sms,
            )
            return out

        forget_kernels()
        begin = time.perf_counter()
        jax.jit(attend).lower(*given[:5]).compile()
        seconds = time.perf_counter() - begin
    (dump,) = dumped()
    return read_facts(dump, card), seconds


def forget_kernels() -> None:
    """Make jax-triton compile and dump all kernels anew: it caches equal kernels, and fails to dump one twice."""
    from pallas_kernels.attention.triton.kernel import attend
    from pallas_kernels.experts.routing import kernel as routing
    from pallas_kernels.experts.triton.kernel import multiply
    from pallas_kernels.sampling.kernel_draw import draw
    from pallas_kernels.sampling.kernel_survey import survey

    for kernel in (attend, multiply, survey, draw, routing.route, routing.choose, routing.place):
        kernel.__dict__.pop("_jT_kernel_cache", None)
    for dump in dumped():
        shutil.rmtree(dump)


def dumped() -> list[Path]:
    """Return the folders of the kernels that jax-triton has compiled since then."""
    return list(Path(_DUMPS.name).iterdir())


def read_facts(dump: Path, card: Gpu) -> TritonFacts:
    """Return the facts of a kernel that jax-triton dumped, after running the ptxas that XLA runs."""
    (ptx,), (information,) = dump.glob("*.ptx"), dump.glob("*.compile_info")
    packages = importlib.util.find_spec("nvidia.cu13")
    assert packages is not None
    assert packages.submodule_search_locations is not None
    (folder,) = packages.submodule_search_locations
    command = [f"{folder}/bin/ptxas", "-v", f"-arch={card.arch}", str(ptx), "-o", os.devnull]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return TritonFacts.of(ptx.read_text(), report, int(information.read_text().rpartition(":")[2]))


def compile_step(name: str, card: Gpu) -> StepFacts:
    """Compile the decode step of a model of the hub with 64 rows."""
    model = parse_config(CONFIGS[name], weights=False)
    layout, bucket = KVLayout.of(model, 64), Bucket(64, 64, decode=True)
    limits = Limits(
        model.max_position, bucket.rows, bucket.tokens, page_size=64, num_slabs=KV_BYTES // layout.slab_bytes(2)
    )
    spec = PackSpec.of(bucket, page_size=64, max_rows=bucket.rows, section=False)
    config = StepConfig(model, layout, bucket, spec, Kernels(attention="triton", sms=card.sms))
    with compiling_for(card) as sharding:
        state = placed(state_shapes(layout, limits, model.vocab_size, BFLOAT16), sharding)
        params = placed(param_shapes(model, BFLOAT16), sharding)
        packed = placed(jax.eval_shape(lambda: jnp.zeros(spec.size, jnp.int32)), sharding)
        begin = time.perf_counter()
        compiled = jax.jit(partial(step, config=config), donate_argnums=1).lower(params, state, packed).compile()
        seconds = time.perf_counter() - begin
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert memory is not None
    thunks, lane = device.thunks("jit_step"), min(lane.size * lane.dtype.itemsize for lane in state["lanes"])
    launched, calls = top_level(thunks), len(re.findall(r"^\s+\d+: kCustomCall", thunks, re.MULTILINE))
    faults = [f"copies {size} bytes" for size in copies(text) if size >= lane]
    if memory.alias_size_in_bytes != state_bytes(state):
        faults.append(f"{memory.alias_size_in_bytes} of {state_bytes(state)} bytes of state are updated in place")
    if launched != ["kCommandBuffer"]:
        faults.append(f"not one command buffer but {', '.join(launched)}")
    if calls != len(model.layers):
        faults.append(f"{calls} attention kernels inside of a command buffer, for {len(model.layers)} layers")
    return StepFacts(f"{name}, {card.name}", launched, calls, memory.temp_size_in_bytes, seconds, faults)


def placed(tree: Any, sharding: Sharding) -> Any:
    """Return the shapes of arrays, placed on devices."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),  # type: ignore[no-untyped-call]
        tree,
    )


def print_kernel(layer: Layer, facts: TritonFacts, card: Gpu, seconds: float) -> None:
    """Print a line per kernel."""
    print(
        f"{layer.name:38}{facts.registers:9}{facts.spills:7}{facts.smem:14}{facts.blocks_per_sm(card):10}"
        f"{facts.threads:8}{facts.products:4}{facts.under_way:7}{seconds:8.1f}",
        flush=True,
    )


def print_step(facts: StepFacts) -> None:
    """Print a line per step."""
    print(
        f"\n{facts.name}: {', '.join(facts.launched)} with {facts.calls} attention kernels, "
        f"{facts.temporaries / 1e6:.1f} MB of temporaries, {facts.seconds:.1f} s to compile"
    )


if __name__ == "__main__":
    main()
