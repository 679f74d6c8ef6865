"""The ptxas that makes GPU code (jswa/exec/compile/ptxas.py)."""

import importlib.util
import os
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from jswa.exec.compile.ptxas import Ptxas, find_ptxas, prefer_packaged


def test_the_ptxas_on_the_path_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version is read as XLA reads it."""
    ptxas = tmp_path / "ptxas"
    ptxas.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V12.9.41'\n")
    ptxas.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_ptxas() == Ptxas(str(ptxas), (12, 9, 41))
    assert Ptxas(str(ptxas), (12, 9, 41)).is_wrong


def test_the_packaged_ptxas_comes_before_that_of_an_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mosaic takes the first on PATH, where an older CUDA may lie; CUDA_ROOT is a wish that is kept."""
    for name, version in (("installed", "12.8.93"), ("nvidia/cu13", "13.5.37"), ("wished", "13.4.1")):
        ptxas = tmp_path / name / "bin" / "ptxas"
        ptxas.parent.mkdir(parents=True)
        ptxas.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, V{version}'\n")
        ptxas.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "installed" / "bin"))
    monkeypatch.delenv("CUDA_ROOT", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec_of(tmp_path / name.replace(".", "/")))
    assert (found := find_ptxas()) is not None
    assert found.version == (12, 8, 93)
    for root, wanted in ((None, (13, 5, 37)), (tmp_path / "wished", (13, 4, 1))):
        if root is not None:
            monkeypatch.setenv("CUDA_ROOT", str(root))
        prefer_packaged()
        prefer_packaged()
        assert (found := find_ptxas()) is not None
        assert found.version == wanted
    assert os.environ["PATH"].count("installed") == 1


def spec_of(folder: Path) -> ModuleSpec | None:
    """Return the spec of a package in a folder, if there is one."""
    if not folder.is_dir():
        return None
    spec = ModuleSpec(folder.name, None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    return spec
