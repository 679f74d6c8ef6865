"""How often a process runs ptxas, counted by a program that stands in front of it. Imports no jax.

XLA and Mosaic run ptxas once for each kernel, and take the one in CUDA_ROOT; jax reads that when it is first imported.
Kernels of jax-triton are compiled when the program is loaded, so they are not among these calls.
"""

import os
import shlex
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jswa.exec.compile.ptxas import find_ptxas, prefer_packaged

# A call without an output asks for the version.
_SCRIPT = """#!/bin/sh
case " $* " in *" -o "*) echo call >>{log} ;; esac
exec {ptxas} "$@"
"""


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """Yield a function that returns how many kernels ptxas has compiled inside. Import jax inside, not before.

    Raises FileNotFoundError if there is no ptxas.
    """
    prefer_packaged()
    found = find_ptxas()
    if found is None:
        raise FileNotFoundError("no ptxas: install the packages of the extra aot")
    own = Path(found.path).parents[1]
    before = os.environ.get("CUDA_ROOT")
    with tempfile.TemporaryDirectory() as name:
        root, log = Path(name), Path(name, "calls")
        (root / "bin").mkdir()
        others = [path for folder in (own, own / "bin") for path in folder.iterdir()]
        for path in others:
            if path.name not in ("bin", "ptxas"):
                (root / path.relative_to(own)).symlink_to(path)
        script = root / "bin" / "ptxas"
        script.write_text(_SCRIPT.format(log=shlex.quote(str(log)), ptxas=shlex.quote(found.path)))
        script.chmod(0o700)
        os.environ["CUDA_ROOT"] = name
        try:
            yield lambda: len(log.read_text().splitlines()) if log.exists() else 0
        finally:
            os.environ.pop("CUDA_ROOT") if before is None else os.environ.update(CUDA_ROOT=before)
