"""Programs that are compiled on a machine without a GPU, kept in files, and loaded on a machine that has it.

`for_h200` makes a process compile for an H200, and needs the packages of the extra `aot`. `keep` writes a program,
`load` reads it where the GPU is, with the same versions of jax and of its plugin. XLA_FLAGS that XLA reads when a
program is compiled belong to the process that compiles. A step of 24 layers takes half a minute to compile, 3 MB, and
1 to 2 s to load. Programs that resemble each other take a third of that if they are packed together: `load` reads
NAME.program as well, which is NAME.program.xz unpacked.
"""

import lzma
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

_ENDING, _UNPACKED = ".program.xz", ".program"


@contextmanager
def for_h200() -> Iterator[Callable[[Any], Any]]:
    """Yield a function that places the shapes of arrays on an H200; inside, kernels on Triton are compiled for it."""
    own_flags = os.environ.get("XLA_FLAGS", "")
    from jax_triton import triton_lib

    from tools.aot import device

    os.environ["XLA_FLAGS"] = own_flags  # without dumps, which take time
    for name in ("MOSAIC_GPU_DUMP_PTX", "MOSAIC_GPU_DUMP_PTXAS"):
        os.environ.pop(name, None)
    library, own = triton_lib.triton_kernel_call_lib, triton_lib.triton_kernel_call_lib.get_compute_capability
    library.get_compute_capability = lambda device: 90
    try:
        yield device.on_h200
    finally:
        library.get_compute_capability = own


def keep(folder: Path, name: str, program: jax.stages.Compiled) -> int:
    """Write a program to a file of this name; return its bytes."""
    content, inputs, outputs = serialize_executable.serialize(program)
    trees = [tree.unflatten(range(tree.num_leaves)) for tree in (inputs, outputs)]
    packed = lzma.compress(pickle.dumps((content, *trees)), preset=1)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}{_ENDING}").write_bytes(packed)
    return len(packed)


def is_kept(folder: Path, name: str) -> bool:
    """Return whether there is a program of this name."""
    return any((folder / f"{name}{ending}").is_file() for ending in (_ENDING, _UNPACKED))


def load(folder: Path, name: str) -> jax.stages.Compiled | None:
    """Return the program of this name; None if there is none. Raises what jaxlib raises if it cannot be loaded."""
    import pallas_kernels.mosaic  # noqa: F401 - loads the runtime that Mosaic's programs call

    if not is_kept(folder, name):
        return None
    plain = folder / f"{name}{_UNPACKED}"
    found = plain.read_bytes() if plain.is_file() else lzma.decompress((folder / f"{name}{_ENDING}").read_bytes())
    content, *trees = pickle.loads(found)  # noqa: S301 - a program is run anyway
    inputs, outputs = (jax.tree.structure(tree) for tree in trees)
    devices = jax.devices()[:1]
    program: jax.stages.Compiled = serialize_executable.deserialize_and_load(
        content, inputs, outputs, backend=devices[0].client, execution_devices=devices
    )
    return program


def loaded(folder: Path | None, name: str, row: dict[str, Any]) -> Any:
    """Return a program of a folder; None without a folder, or if it cannot be loaded. The row of results says which."""
    program = None
    try:
        program = None if folder is None else load(folder, name)
    except Exception as error:  # jaxlib raises many types
        row["not_loaded"] = f"{type(error).__name__}: {error}"[:300]
    row["loaded"] = program is not None
    return program
