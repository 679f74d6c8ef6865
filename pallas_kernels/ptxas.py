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
_PACKAGES = "cu13", "cuda_nvcc"  # of nvidia-cuda-nvcc for CUDA 13 and for CUDA 12


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


@cache
def find_ptxas() -> Ptxas | None:
    """Return the ptxas that compiles Mosaic's kernels, or None if there is none that runs.

    Mosaic takes the one of the package nvidia-cuda-nvcc beside jax's plugin. XLA first looks into the folder that
    CUDA_ROOT names, if it is set, and then does the same. Without the package both take what a CUDA installation has.
    """
    packages = (importlib.util.find_spec("nvidia") and importlib.util.find_spec(f"nvidia.{name}") for name in _PACKAGES)
    folders = [folder for spec in packages if spec for folder in spec.submodule_search_locations or ()]
    folders += [os.environ.get("CUDA_ROOT", ""), "/usr/local/cuda"]
    for path in (*(f"{folder}/bin/ptxas" for folder in folders), shutil.which("ptxas")):
        found = path and _version(path)
        if path and found:
            return Ptxas(path, found)
    return None


def _version(path: str) -> tuple[int, ...] | None:
    try:
        report = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    found = re.search(r"\bV(\d+)\.(\d+)\.(\d+)\b", report)
    return tuple(map(int, found.groups())) if found else None
