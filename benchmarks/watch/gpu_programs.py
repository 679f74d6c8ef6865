"""Two decode steps compiled for an H200 on a machine without a GPU: nodes of their graphs, and calls of ptxas.

A node is a kernel or a copy, whose launch costs the device. Most nodes are in branches for requests that want more
than the most likely token; a greedy step runs the others. XLA and Mosaic call ptxas once for each kernel that they have
not compiled yet: it takes most of a cold start. Needs the packages of the extra `aot`.
"""

import importlib.util
import os
import re
import tempfile
from pathlib import Path

_GROUPS = ("kCommandBuffer", "kConditional", "kSequential", "kWhile")
_WRAPPER = """#!/bin/sh
echo >> "{calls}"
exec "{ptxas}" "$@"
"""


def figures() -> dict[str, float]:
    """Return nodes, nodes outside of branches, and calls of ptxas, of a default step and of one with fast kernels."""
    with tempfile.TemporaryDirectory() as folder:
        calls = counted_ptxas(Path(folder))
        from tools.aot import device
        from tools.aot.step_specs import StepSpec
        from tools.aot.steps import facts_of

        fast = StepSpec(
            "gpt-oss-20b", 2, 0, rows=1, quantization="mxfp4", elementwise="mosaic", sampling="triton", routing="triton"
        )
        specs = {"2 layers of gemma-3-27b": StepSpec("gemma-3-27b", 2, 0, rows=8), "2 of gpt-oss-20b, fast": fast}
        found: dict[str, float] = {}
        for name, spec in specs.items():
            before = calls.stat().st_size
            facts_of(spec)
            everywhere, outside = nodes(device.thunks("jit_step"))
            found[f"{name}: nodes"] = everywhere
            found[f"{name}: nodes of a greedy step"] = outside
            found[f"{name}: calls of ptxas"] = calls.stat().st_size - before
        return found


def counted_ptxas(folder: Path) -> Path:
    """Have XLA and Mosaic call a ptxas that first appends a byte to a file; return that file.

    Call it before the first kernel is compiled. Raises RuntimeError if no package has ptxas.
    """
    spec = importlib.util.find_spec("nvidia.cu13")
    roots = [Path(name) for name in (spec.submodule_search_locations or () if spec else ())]
    root = next((path for path in roots if (path / "bin" / "ptxas").is_file()), None)
    if root is None:
        raise RuntimeError("no package has ptxas: install the extra aot")
    calls = folder / "calls"
    calls.touch()
    for part in root.iterdir():
        if part.name != "bin":
            (folder / part.name).symlink_to(part)
    (folder / "bin").mkdir()
    wrapper = folder / "bin" / "ptxas"
    wrapper.write_text(_WRAPPER.format(calls=calls, ptxas=root / "bin" / "ptxas"))
    wrapper.chmod(0o700)
    os.environ["CUDA_ROOT"] = str(folder)
    return calls


def nodes(thunks: str) -> tuple[int, int]:
    """Return the kernels and copies of a program's thunks: all, and those that are in no branch.

    Args:
        thunks: one per line, indented by how deep they are; see `tools.aot.device.thunks`.
    """
    around: list[str] = []  # the kinds of the thunks that the current one is inside of
    everywhere = outside = 0
    for indent, kind in re.findall(r"^( *)\d+: (k\w+)", thunks, re.MULTILINE):
        around = around[: len(indent) // 4]
        if kind not in _GROUPS:
            everywhere += 1
            outside += "kConditional" not in around
        around.append(kind)
    return everywhere, outside
