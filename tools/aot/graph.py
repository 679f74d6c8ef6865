"""Compile the default decode step of a model for an H200 on any machine; print the nodes of its graph, and judge them.

    .venv-gpu/bin/python -m tools.aot.graph --model gpt-oss-20b
    .venv-gpu/bin/python -m tools.aot.graph --model gpt-oss-20b gemma-3-27b --layers 4 6

The kernels are those that an engine chooses on an H200 if none is named and jax-triton is installed. A node is a
kernel, a copy or a conditional of the step's graph. Branches of conditionals are in the graph whether they run or not,
so they are counted; a call of cuBLAS counts as one. Calls of ptxas are counted by a program in front of it. Kernels of
jax-triton are compiled when a program is loaded; each different one is added to the calls.

The gate: at most 12 nodes a layer in all layers together, 40 outside of them, and 80 calls of ptxas. With fewer
--layers than the model has, the same numbers are judged: they hold for all layers if those that are left out are like
the first ones, and if indices do not grow with depth, which `tools.aot.hopper` checks. What one layer has for all, such
as a list of tiles, weighs more among few layers. Bytes and seconds are printed, not judged; the seconds contain XLA's
dumps, from which the nodes are read.
"""

import argparse
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from tools.aot.measures import nodes, ptxas

if TYPE_CHECKING:
    from tools.aot.step_specs import StepSpec

NODES, OUTSIDE, PTXAS = 12, 40, 80  # a layer, outside of layers; calls
SAMPLER, SAMPLER_NODES = ("sampling", "logprobs"), 8  # its scopes, and its share of the nodes outside of layers


class Graph(NamedTuple):
    """A compiled decode step.

    Attributes:
        name: the model, how many of its layers were compiled, and the rows.
        rooms: nodes by layer, and by scope outside of layers.
        calls: of ptxas, by XLA and Mosaic.
        loaded: calls of ptxas when the program is loaded.
        temporaries, argument_bytes: bytes.
        arguments: arrays.
        seconds: to trace, to lower and to compile.
    """

    name: str
    rooms: dict[str, int]
    calls: int
    loaded: int
    temporaries: int = 0
    arguments: int = 0
    argument_bytes: int = 0
    seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def layers(self) -> list[int]:
        """The nodes of each layer."""
        return [count for room, count in self.rooms.items() if room.startswith("layer_")]

    @property
    def outside(self) -> dict[str, int]:
        """The nodes outside of layers, by scope, most first."""
        found = {room: count for room, count in self.rooms.items() if not room.startswith("layer_")}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def faults(self, *, sampler: bool = True) -> list[str]:
        """Return what is past the gate. Without the sampler neither its nodes nor calls of ptxas are judged."""
        outside = sum(count for room, count in self.outside.items() if sampler or room not in SAMPLER)
        inside, most = sum(self.layers), NODES * len(self.layers)
        limit, calls = OUTSIDE - SAMPLER_NODES * (not sampler), self.calls + self.loaded
        found = [f"{inside} nodes in {len(self.layers)} layers: at most {most}"] if inside > most else []
        found += [f"{outside} nodes outside of layers: at most {limit}"] if outside > limit else []
        found += [f"{calls} calls of ptxas: at most {PTXAS}"] if sampler and calls > PTXAS else []
        return [f"{self.name}: {fault}" for fault in found]


def main() -> None:
    """Print the graphs. Exit with 1 if one is past the gate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["gpt-oss-20b"], help="names in tools.cases.hub_configs")
    parser.add_argument("--layers", nargs="+", type=int, help="the first layers of each model; all if not given")
    parser.add_argument("--rows", type=int, default=64, help="of the step")
    parser.add_argument("--without-sampler", action="store_true", help="judge neither its nodes nor calls of ptxas")
    options = parser.parse_args()
    if options.layers is not None and len(options.layers) != len(options.model):
        parser.error(f"--layers has {len(options.layers)} numbers for {len(options.model)} models")
    faults = []
    with ptxas.counted() as calls:
        for number, model in enumerate(options.model):
            before = calls()
            graph = compiled(model, options.layers and options.layers[number], options.rows)
            graph = graph._replace(calls=calls() - before)
            show(graph)
            faults += graph.faults(sampler=not options.without_sampler)
    sys.exit("\n".join(faults) or None)


def compiled(model: str, layers: int | None, rows: int) -> Graph:
    """Compile a step, and read its graph; calls of ptxas are the caller's to count."""
    from jswa.exec.compile.program import jit_step  # imports jax, and that reads where ptxas is
    from tools.aot import device, triton
    from tools.aot.steps import prepared
    from tools.aot.triton_facts import gpu

    spec = default_spec(model, layers, rows)
    given = prepared(spec)
    with device.captured(), triton.compiling_for(gpu("h200")):
        times = [time.perf_counter()]
        traced = jit_step(given.config, given.params, given.state).trace(*given.arguments)
        times.append(time.perf_counter())
        lowered = traced.lower()
        times.append(time.perf_counter())
        program = lowered.compile()
        times.append(time.perf_counter())
    text, memory = program.as_text(), program.memory_analysis()
    assert text is not None
    assert memory is not None
    found = nodes.nodes_of(device.thunks("jit_step"), device.thunk_names("jit_step"), text)
    return Graph(
        spec.name,
        nodes.by_room(found),
        0,
        nodes.triton_kernels(text),
        memory.temp_size_in_bytes,
        nodes.arguments(text),
        memory.argument_size_in_bytes,
        (times[1] - times[0], times[2] - times[1], times[3] - times[2]),
    )


def default_spec(model: str, layers: int | None, rows: int) -> "StepSpec":
    """Return the decode step that an engine runs on an H200 if no kernel is named, of the model as it is released."""
    import jax.numpy as jnp

    from jswa.exec.served import what_serves
    from jswa.kernels import DeviceFacts, resolve
    from jswa.model.hf.config import parse_config
    from tools.aot import device
    from tools.aot.step_specs import StepSpec
    from tools.cases.hub_configs import CONFIGS

    dtype, config = jnp.dtype("bfloat16"), CONFIGS[model]
    mxfp4 = config.get("quantization_config", {}).get("quant_method") == "mxfp4"
    own = parse_config(config, weights=False)
    facts = DeviceFacts("gpu", 9.0, dtype.name, sms=device.SMS, packed_experts=mxfp4)
    parts = resolve("auto", facts, what_serves(own, dtype, dtype, plain=True))._asdict()
    del parts["sms"]
    spec = StepSpec(model, layers or len(own.layers), 0, rows=rows, **parts)
    return replace(spec, quantization="mxfp4") if mxfp4 else spec


def show(graph: Graph) -> None:
    """Print a graph."""
    print(f"{graph.name}\n{'nodes':>6}")
    for count in sorted(set(graph.layers)):
        print(f"{count:6}  in each of {graph.layers.count(count)} layers")
    for room, count in graph.outside.items():
        print(f"{count:6}  {room}")
    print(f"{sum(graph.rooms.values()):6}  all; outside of layers {sum(graph.outside.values())}")
    trace, lower, compile_ = graph.seconds
    print(
        f"{graph.calls + graph.loaded} calls of ptxas, of which {graph.loaded} when the program is loaded; "
        f"{graph.temporaries / 1e6:.1f} MB of temporaries; {graph.arguments} arguments, "
        f"{graph.argument_bytes / 1e9:.2f} GB; {trace:.1f} s to trace, {lower:.1f} to lower, {compile_:.1f} to compile",
        flush=True,
    )


if __name__ == "__main__":
    main()
