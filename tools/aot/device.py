"""Compile for an H200 on a machine without a GPU: the device, and the output of the compilers.

Needs the packages of the extra `aot`, but no driver, no CUDA runtime and no cuDNN. Import it before jax is used.
"""

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Sharding, SingleDeviceSharding

from jswa.exec.compile.ptxas import prefer_packaged
from tools.aot.facts import KernelFacts, parse
from tools.aot.measures.tma import linted

TARGET = Path(__file__).parent.parent.parent / "pallas_kernels" / "tuning" / "h200.txtpb"
# Multiprocessors of the target: kernels that are compiled for another number have other splits.
SMS = int(re.findall(r"core_count: (\d+)", TARGET.read_text())[0])
_DUMPS = tempfile.TemporaryDirectory()  # removed when the process ends

# jax reads these when it first makes a backend or a compiler, not when it is imported.
prefer_packaged()  # as an engine does
jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ.update(MOSAIC_GPU_DUMP_PTX="1", MOSAIC_GPU_DUMP_PTXAS="1")  # to stdout: see `captured`
_DUMP = f"--xla_dump_to={_DUMPS.name} --xla_dump_hlo_module_re=step|half"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DUMP}"


@cache
def h200() -> Sharding:
    """Return a sharding that places an array on one H200."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=TARGET.read_text(), topology="1x1x1")
    return SingleDeviceSharding(topology.devices[0])


def on_h200(tree: Any) -> Any:
    """Return the shapes of arrays, placed on the H200."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=h200()),  # type: ignore[no-untyped-call]
        tree,
    )


@contextmanager
def captured() -> Iterator[list[KernelFacts]]:
    """Yield a list that has the Mosaic kernels compiled inside once the block ends. Output to stdout is swallowed.

    Raises ValueError if the driver would refuse one of their TMA descriptors.
    """
    found: list[KernelFacts] = []
    sys.stdout.flush()
    saved = os.dup(1)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 1)
        try:
            with linted():
                yield found
        finally:
            sys.stdout.flush()
            os.dup2(saved, 1)
            os.close(saved)
        file.seek(0)
        found += parse(file.read())


def thunks(module: str) -> str:
    """Return XLA's thunks for the last compiled program of that name: one per line, inner thunks indented."""
    return _dumped(f"*.{module}.thunk_sequence_after_thunk_passes.txt")


def thunk_names(module: str) -> str:
    """Return XLA's metadata of these thunks: the number, kind and instruction of each."""
    return _dumped(f"*.{module}.thunk_metadata.txt")


def _dumped(pattern: str) -> str:
    return max(Path(_DUMPS.name).glob(pattern), key=os.path.getmtime).read_text()
