"""The C++ kernels under the sanitizers, without XLA: `harness.cc` compares them with plain loops."""

import subprocess
from pathlib import Path

import pytest

from pallas_kernels.cpu.build import SOURCES, CannotBuild, compiler, kernel_command

HARNESS = Path(__file__).parent / "harness.cc"
NEEDS = {"base": (), "avx2": ("avx2", "fma", "f16c"), "avx512bf16": ("avx512bw", "avx512dq", "avx512vl", "avx512_bf16")}
QUICK = ("avx2", "address")  # runs with every change of a kernel


def cases() -> list[object]:
    """Return every set of instructions with every sanitizer: one of them with every change, the others nightly."""
    return [
        pytest.param(level, kind, marks=[] if (level, kind) == QUICK else [pytest.mark.nightly])
        for level in NEEDS
        for kind in ("address", "undefined", "thread")
    ]


@pytest.mark.parametrize(("level", "kind"), cases())
def test_the_kernels_are_clean_and_right(level: str, kind: str, tmp_path: Path) -> None:
    """Every buffer has exactly its size, several threads share the tasks; results are those of plain loops."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("flags")[2].partition("\n")[0].split()
    if not set(NEEDS[level]) <= set(flags):
        pytest.skip(f"this processor has no {level}")
    try:
        found = compiler()
    except CannotBuild as error:
        pytest.skip(str(error))
    checks = ("-O1", "-g1", f"-fsanitize={kind}", "-fno-sanitize-recover=all", "-w")
    objects = {name: tmp_path / f"{name}.o" for name in (level, "vnni", "pairs")}
    harness, quads = tmp_path / "harness", "vnni" if "avx512_vnni" in flags and level != "avx2" else "pairs"
    chosen = (f"-DJSWA_KERNELS=kernels_{level}", f"-DJSWA_QUADS=kernels_{quads}")
    sources = ("-std=c++17", *checks, f"-I{SOURCES}", *chosen, str(HARNESS), *map(str, objects.values()))
    for name, made in objects.items():
        run(kernel_command(name, made, *checks))
    run([found, *sources, "-o", str(harness), "-pthread"])
    run([str(harness)])


def run(command: list[str]) -> None:
    """Run a command; fail with what it prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{command[0]}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
