"""What a machine with a GPU may lack beside Python packages: a ptxas for Mosaic, and jax-triton for its Triton.

    .venv-gpu/bin/python -m benchmarks.gpu.site .gpu-site            on a machine with a package index: adds both,
                                                                     and removes what such a machine has

Mosaic needs ptxas 13.3 or newer, which is the compiler of nvidia-cuda-nvcc; compressed it takes a quarter of its size.
`use` unpacks it where the calls run. jax-triton 0.4 is written for Triton 3.7: of what it imports 3.6 lacks one number.
"""

import argparse
import importlib.util
import lzma
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".gpu-site"
_PTXAS, _DEVICE = "cuda/ptxas.xz", "cuda/libdevice.10.bc"
# Large packages that GPU machines had already: without them the folder and the sources stay below 64 MiB.
_THERE = ("beartype*", "hypothesis*", "_hypothesis*", "pygments*")
_NEWER = "  from triton.backends.nvidia.driver import TMA_TF32 as _TMA_TF32"
_NUMBER = "  _TMA_TF32 = 11  # as Triton 3.7 has it"


def main(words: Sequence[str] | None = None) -> None:
    """Add the compiler and jax-triton of this environment to a folder of packages; remove those that are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder that is brought to the machine")
    folder: Path = parser.parse_args(words).folder
    for path in [path for pattern in _THERE for path in folder.glob(pattern)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    cuda = _installed("nvidia.cu13")
    (folder / "cuda").mkdir(parents=True, exist_ok=True)
    (folder / _PTXAS).write_bytes(lzma.compress((cuda / "bin" / "ptxas").read_bytes(), preset=6))
    shutil.copy(cuda / "nvvm" / "libdevice" / "libdevice.10.bc", folder / _DEVICE)
    target = folder / "jax_triton"
    shutil.copytree(_installed("jax_triton"), target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    lines = (target / "triton_lib.py").read_text(encoding="utf-8").splitlines()
    (target / "triton_lib.py").write_text("\n".join(map(for_triton_36, lines)) + "\n", encoding="utf-8")


def for_triton_36(line: str) -> str:
    """Return a line of jax-triton's source, changed so that it runs with Triton 3.6."""
    return _NUMBER if line.startswith(_NEWER) else line


def use(folder: Path = FOLDER, environ: "os._Environ[str] | dict[str, str]" = os.environ) -> Path | None:
    """Unpack the compiler of a folder, and have Mosaic and XLA find it; return where it is, None if there is none."""
    if not (folder / _PTXAS).is_file():
        return None
    root = Path(tempfile.mkdtemp(prefix="cuda-"))
    for part in ("bin", "nvvm/libdevice"):
        (root / part).mkdir(parents=True)
    ptxas = root / "bin" / "ptxas"
    ptxas.write_bytes(lzma.decompress((folder / _PTXAS).read_bytes()))
    ptxas.chmod(0o755)
    shutil.copy(folder / _DEVICE, root / "nvvm" / "libdevice")
    environ["CUDA_ROOT"] = str(root)
    environ["PATH"] = f"{root / 'bin'}:{environ.get('PATH', '')}"
    environ["XLA_FLAGS"] = f"{environ.get('XLA_FLAGS', '')} --xla_gpu_cuda_data_dir={root}".strip()
    return root


def _installed(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{package} is not installed: make .venv-gpu/installed")
    return Path(next(iter(spec.submodule_search_locations)))


if __name__ == "__main__":
    main()
