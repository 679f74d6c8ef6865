"""What is brought to a machine with a GPU: its compiler is found, and jax-triton fits its Triton."""

import importlib.util
import lzma
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.gpu.site import for_triton_36, use

PTXAS = '#!/bin/sh\necho "release 13.5, V13.5.37"\n'


def test_a_compiler_that_was_brought_is_the_one_that_is_found(tmp_path: Path) -> None:
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "ptxas.xz").write_bytes(lzma.compress(PTXAS.encode()))
    (tmp_path / "cuda" / "libdevice.10.bc").write_bytes(b"bitcode")
    environ = {"PATH": os.environ["PATH"], "XLA_FLAGS": "--xla_a=1"}
    root = use(tmp_path, environ)
    assert root is not None
    assert (root / "nvvm" / "libdevice" / "libdevice.10.bc").read_bytes() == b"bitcode"
    assert environ["CUDA_ROOT"] == str(root)
    assert environ["XLA_FLAGS"] == f"--xla_a=1 --xla_gpu_cuda_data_dir={root}"
    said = subprocess.run(["ptxas", "--version"], env=environ, capture_output=True, text=True, check=True).stdout
    assert "V13.5.37" in said


def test_without_a_compiler_nothing_changes(tmp_path: Path) -> None:
    environ = {"PATH": "/bin"}
    assert use(tmp_path, environ) is None
    assert environ == {"PATH": "/bin"}


def test_jax_triton_imports_what_triton_36_has() -> None:
    """One line of the source that is locked."""
    before = "  from triton.backends.nvidia.driver import TMA_TF32 as _TMA_TF32  # pyrefly: ignore"
    assert for_triton_36(before).strip().startswith("_TMA_TF32 = 11")
    assert for_triton_36("import triton") == "import triton"
    spec = importlib.util.find_spec("jax_triton")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("jax-triton is not installed here")
    source = Path(next(iter(spec.submodule_search_locations)), "triton_lib.py").read_text(encoding="utf-8")
    assert sum(for_triton_36(line) != line for line in source.splitlines()) == 1
