"""The ptxas that makes GPU code of PTX, for the kernels of Mosaic and of XLA. Imports no jax."""

import importlib.util
import os
import re
import shutil
import subprocess
from functools import cache
from typing import NamedTuple

# CUDA 12.8 to 12.9.0 give wrong code for WGMMA with an operand in registers, which the attention kernel and MXFP4
# experts use. 12.9.1 is V12.9.86.
_WRONG = (12, 8, 0), (12, 9, 86)


class Ptxas(NamedTuple):
    """A ptxas: its path, and its version as XLA reads it (V13.5.37)."""

    path: str
    version: tuple[int, ...]

    def __str__(self) -> str:
        """Version and path, as error messages name them."""
        return f"ptxas {'.'.join(map(str, self.version))} ({self.path})"

    @property
    def is_wrong(self) -> bool:
        """Whether it is known to give wrong code for the Hopper kernels."""
        return _WRONG[0] <= self.version < _WRONG[1]


def prefer_packaged() -> None:
    """Put the ptxas of the package nvidia-cuda-nvcc first on PATH, or the one of CUDA_ROOT if that is set.

    XLA takes it anyway for its own kernels; Mosaic takes the first on PATH, where an older CUDA may be installed. Call
    it before the first kernel is compiled.
    """
    names = [os.environ["CUDA_ROOT"]] if os.environ.get("CUDA_ROOT") else _packages()
    folder = next((f"{name}/bin" for name in names if os.path.isfile(f"{name}/bin/ptxas")), None)
    paths = os.environ.get("PATH", "").split(os.pathsep)
    if folder is not None and paths[0] != folder:
        os.environ["PATH"] = os.pathsep.join([folder, *paths])


def find_ptxas() -> Ptxas | None:
    """Return the ptxas that compiles Mosaic's kernels: the first on PATH, else a package's or an installation's."""
    for path in (shutil.which("ptxas"), *(f"{folder}/bin/ptxas" for folder in (*_packages(), "/usr/local/cuda"))):
        found = path and _version(path)
        if path and found:
            return Ptxas(path, found)
    return None


def _packages() -> list[str]:
    """Return the folders of nvidia-cuda-nvcc for CUDA 13 and for CUDA 12, as far as they are installed."""
    if importlib.util.find_spec("nvidia") is None:
        return []
    specs = (importlib.util.find_spec(f"nvidia.{name}") for name in ("cu13", "cuda_nvcc"))
    return [folder for spec in specs if spec for folder in spec.submodule_search_locations or ()]


@cache
def _version(path: str) -> tuple[int, ...] | None:
    try:
        report = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    found = re.search(r"\bV(\d+)\.(\d+)\.(\d+)\b", report)
    return tuple(map(int, found.groups())) if found else None
