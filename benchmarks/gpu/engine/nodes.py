"""What a launch takes of the host by the number and kind of a program's kernels and by its arguments.

    python -m benchmarks.gpu.engine.nodes [--programs FOLDER] [--json FILE] [--small]
    .venv-gpu/bin/python -m benchmarks.gpu.engine.nodes --compile FOLDER                         without a GPU

A program is a chain of small kernels of one kind, over arrays that are its arguments, and a state of eight arrays that
is donated. `queued`: launches follow each other without waiting, so the host's microseconds are those of the call.
`in turn`: the next launch before the result of the last is fetched. `idle`: each launch after the device has ended, and
`step` is the time to the result. How XLA launches graphs is an XLA_FLAG of the process, set for --compile too.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import result_file
from benchmarks.gpu import elsewhere
from benchmarks.gpu.engine.launching import Launches, on_host
from benchmarks.gpu.engine.step_trace import traced
from pallas_kernels.elementwise import sums
from pallas_kernels.elementwise.api import residual_norms
from pallas_kernels.elementwise.arguments import Join, Parts, Rms

Kind = Literal["xla", "cublas", "triton", "mosaic", "branch", "switches"]
_STATE = 8
_COLUMNS = 2_880


@dataclass(frozen=True)
class Chain:
    """A program: so many kernels of a kind, over so many arguments.

    branch: all but eight kernels are in a branch that is not taken. switches: each kernel is behind a conditional of
    its own, whose other branch changes nothing.
    """

    kind: Kind
    nodes: int
    arguments: int

    @property
    def name(self) -> str:
        """Name of its file and of its row."""
        return f"{self.kind}-{self.nodes}-{self.arguments}"

    def run(self, weights: Sequence[Any], state: Sequence[Any], packed: Any) -> tuple[list[Any], Any]:
        """Run the chain; return the state and a result."""
        x = state[0] + packed[0].astype(state[0].dtype)
        inside = self.nodes - 8 if self.kind == "branch" else 0
        for number in range(self.nodes - inside):
            x = self._one(x, weights[number % len(weights)], packed, number)
        if inside:

            def taken(x: jax.Array) -> jax.Array:
                for number in range(inside):
                    x = self._one(x, weights[number % len(weights)], packed, number)
                return x

            x = lax.cond(packed[1] > 0, taken, lambda x: x, x)
        return [x, *(each + 1 for each in state[1:])], x[:, 0]

    def _one(self, x: jax.Array, weight: jax.Array, packed: jax.Array, number: int) -> jax.Array:
        if self.kind == "switches":
            y: jax.Array = lax.cond(packed[1] > number, lambda x: _apart(jnp.tanh(x) * weight), lambda x: x, x)
            return y
        if self.kind in ("xla", "branch"):
            return _apart(jnp.tanh(x) * weight)
        if self.kind == "triton":
            out: jax.Array = sums.softmax(x, "triton")
            return out
        if self.kind == "cublas":
            return _apart(x @ weight)
        y, _ = residual_norms(Parts(x[None]), x, Join(None, Rms(1e-5)), pre_weight=weight, implementation="mosaic")
        return y


def _apart(x: jax.Array) -> jax.Array:
    out: jax.Array = lax.optimization_barrier(x)  # type: ignore[no-untyped-call]
    return out


def chains(*, small: bool = False) -> Iterator[Chain]:
    """Yield the programs, those that matter most first."""
    if small:
        yield from (Chain("xla", 4, 2), Chain("cublas", 4, 2), Chain("branch", 10, 2), Chain("switches", 4, 2))
        return
    for nodes in (8, 64, 256, 512):
        yield Chain("xla", nodes, 8)
    for arguments in (128, 400):
        yield Chain("xla", 8, arguments)
    yield Chain("xla", 256, 400)
    yield Chain("branch", 264, 8)
    for kind in ("mosaic", "cublas", "triton"):
        yield from (Chain(kind, nodes, 8) for nodes in (8, 72))
    yield from (Chain("switches", nodes, 8) for nodes in (2, 16))


def arrays_of(chain: Chain) -> tuple[Any, Any, Any]:
    """Return weights, state and packed input of a chain."""
    kind = jnp.dtype("float32" if chain.kind == "triton" else "bfloat16")
    columns = 256 if chain.kind == "cublas" else _COLUMNS
    shape = (columns, columns) if chain.kind == "cublas" else (columns,)
    weights = [jnp.full(shape, 1 / columns, kind) for _ in range(chain.arguments)]
    state = [jnp.zeros((64, columns), kind) for _ in range(_STATE)]
    return weights, state, np.zeros(4_096, np.int32)


def lowered(chain: Chain, place: Callable[[Any], Any]) -> jax.stages.Lowered:
    """Trace a chain for arguments that `place` puts on a device."""

    def chained(weights: Any, state: Any, packed: Any) -> Any:
        return chain.run(weights, state, packed)

    shapes = jax.eval_shape(lambda: arrays_of(chain))
    return jax.jit(chained, donate_argnums=1).lower(*place(shapes))


def timed(chain: Chain, program: Any) -> dict[str, Any]:
    """Return the times of a chain."""
    weights, state, packed = arrays_of(chain)

    def run(placed: Any) -> jax.Array:
        nonlocal state
        state, result = program(weights, state, placed)
        out: jax.Array = result
        return out

    launches = Launches(lambda: packed, run)
    out = launches.all()

    def few() -> None:
        results = [launches.one(packed, []) for _ in range(4)]
        np.asarray(results[-1])

    if jax.default_backend() == "gpu":
        out |= {"trace": about(traced(few), 4), "host": on_host(few, 40)}
    return out


def uploads() -> dict[str, Any]:
    """Return the host's microseconds for an upload of 16 KB, by the way in which it is asked for."""
    packed, device = np.zeros(4_096, np.int32), jax.devices()[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    ways: dict[str, Callable[[], Any]] = {
        "device_put": lambda: jax.device_put(packed),
        "device_put, device": lambda: jax.device_put(packed, device),
        "device_put, sharding": lambda: jax.device_put(packed, sharding),
        "jnp.asarray": lambda: jnp.asarray(packed),
        "pinned memory": lambda: jax.device_put(
            packed, jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        ),
        "several in one": lambda: jax.device_put([packed] * 8),
    }
    found: dict[str, Any] = {}
    for name, way in ways.items():
        seconds = []
        try:
            for number in range(120):
                start = time.perf_counter()
                out = way()
                seconds.append(time.perf_counter() - start)
                if number % 8 == 0:
                    jax.block_until_ready(out)  # type: ignore[no-untyped-call]
            found[name] = 1e6 * statistics.median(seconds[20:])
        except Exception as error:  # the next way may run
            found[name] = f"{type(error).__name__}: {error}"[:200]
    return found


def about(found: Sequence[Any], steps: int) -> dict[str, Any]:
    """Return kernels of a step, their time and how long the device waits in it, by a trace of several; in µs."""
    busy = sum(kernel.duration for kernel in found) / 1e3 / steps
    span = (max((k.begin + k.duration for k in found), default=0) - min((k.begin for k in found), default=0)) / 1e3
    return {"kernels": len(found) / steps, "busy": busy, "span": span / steps}


def main(words: Sequence[str] | None = None) -> None:
    """Compile, or measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", type=Path, help="folder to write programs to, without a GPU")
    parser.add_argument("--programs", type=Path, help="folder with programs")
    parser.add_argument("--only", nargs="+", default=[], help="names of chains")
    parser.add_argument("--small", action="store_true", help="few kernels on any machine; the figures mean nothing")
    parser.add_argument("--seconds", type=float, default=3600, help="after which no chain begins")
    parser.add_argument("--json", type=Path, help="result file to write")
    args = parser.parse_args(words)
    every = list(chains(small=args.small))
    if args.compile:
        with elsewhere.for_h200() as place:
            for chain in every:
                begin = time.perf_counter()
                size = elsewhere.keep(args.compile, chain.name, lowered(chain, place).compile())
                print(f"{chain.name}: {time.perf_counter() - begin:.1f} s, {size / 1e6:.2f} MB", flush=True)
        return
    began, rows = time.monotonic(), list[dict[str, Any]]()
    facts: dict[str, Any] = {"device": jax.devices()[0].device_kind, "xla_flags": os.environ.get("XLA_FLAGS", "")}
    facts["upload_us"] = uploads()
    print(facts["upload_us"], flush=True)
    every = [chain for chain in every if not args.only or chain.name in args.only]
    for chain in every:
        if time.monotonic() - began > args.seconds:
            break
        row: dict[str, Any] = {"kind": chain.kind, "nodes": chain.nodes, "arguments": chain.arguments}
        begin = time.perf_counter()
        try:
            program = elsewhere.loaded(args.programs, chain.name, row)
            program = program or lowered(chain, lambda tree: tree).compile()
            row["ready_seconds"] = time.perf_counter() - begin
            row |= timed(chain, program)
        except Exception as error:  # the next one may run
            row["why"] = f"{type(error).__name__}: {error}"[:400]
        stats = jax.devices()[0].memory_stats()
        facts["memory_stats"] = sorted(stats) if stats else None
        rows.append(row)
        print(row, flush=True)
        if args.json:
            result_file.write(args.json, {**facts, "chains": rows})


if __name__ == "__main__":
    main()
