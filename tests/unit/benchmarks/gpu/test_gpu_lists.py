"""Each kernel for GPUs has tests, a comparison on a GPU, a compilation without one, and a check at start."""

import ast
from pathlib import Path

import pytest

from benchmarks.gpu.numerics import GROUPS
from jswa.exec.selfcheck.check import CHECKS
from jswa.kernels import TABLE, DeviceFacts
from tools.cases.kernels.table import KERNELS, OTHERS

ROOT = Path(__file__).parents[4]
CPU = DeviceFacts("cpu", None, "bfloat16")


def lists_of(path: str) -> set[str]:
    """Return the modules below tools.cases.kernels that a file imports."""
    tree = ast.parse((ROOT / path).read_text())
    imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    start = "tools.cases.kernels."
    return {name.removeprefix(start) for name in imported if name.startswith(start)}


def test_the_kernels_of_gpus_are_listed() -> None:
    """All kernels that do not run on every CPU; a few of these are not jswa's own."""
    own = [kernel for kernel in TABLE if kernel.checked and not all(need.met(CPU) for need in kernel.needs)]
    assert {f"{kernel.operation}={kernel.name}" for kernel in own} == KERNELS.keys() | OTHERS.keys()


@pytest.mark.parametrize("name", KERNELS)
def test_tests_numerics_and_compilation_draw_from_one_list(name: str) -> None:
    """The tests of a kernel are a group of those on a GPU, and they and the compiler import the operation's list."""
    checked, operation = KERNELS[name], name.partition("=")[0]
    tests = f"tests/unit/pallas_kernels/{checked.tests}.py"
    assert operation in CHECKS
    assert tests in {group.file for group in GROUPS}
    for path in (tests, f"tools/aot/{checked.compiler.replace('.', '/')}.py"):
        assert any(found.startswith(checked.cases) for found in lists_of(path)), path
