"""Compiles the library: `python -m pallas_kernels.cpu.build`. Imports no jax.

One object file for each set of instructions that the kernels know, two of them at a time, then one shared library.
"""

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
LIBRARY = Path(__file__).parent / "jswa_cpu.so"
# No fast-math: the engine must see NaN and infinity. Products and sums are contracted only where the code says so.
_COMMON = (
    "-std=c++17",
    "-ffunction-sections",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-march=x86-64-v2",
    "-Wall",
)
# GCC's own headers read undefined vectors, and warn of it in -O3.
_QUIET = ("-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_LEVELS = {
    "avx512bf16": ("-O3", *_AVX512, "-mavx512bf16"),
    "avx512": ("-O3", *_AVX512),
    "avx2": ("-O3", *_AVX2),
    "base": ("-O1",),
    "vnni": ("-O3", *_AVX512, "-mavx512vnni"),
    "pairs": ("-O3", *_AVX2),
}
_SOURCES = {"vnni": "quads.cc", "pairs": "pairs.cc"}  # of the others: kernels.cc


class CannotBuild(Exception):
    """The library cannot be compiled here.

    Attributes:
        why: the reason, in one line; the message may have more.
        remedy: what the user can do about it, in the imperative; empty if nothing helps.
    """

    def __init__(self, why: str, remedy: str = "", details: str = "") -> None:
        super().__init__(f"{why}\n{details}" if details else why)
        self.why = why
        self.remedy = remedy


def digest_of_sources() -> str | None:
    """Return the digest of the C++ sources and of this file; None if they are not there."""
    files = sorted(path for path in SOURCES.glob("*") if path.suffix in (".cc", ".h")) if SOURCES.is_dir() else []
    whole = hashlib.sha256(Path(__file__).read_bytes()) if files else None
    for path in files:
        assert whole is not None
        whole.update(f"{path.name}\n".encode() + path.read_bytes())
    return None if whole is None else whole.hexdigest()


def interface() -> int:
    """Return the version of XLA's interface in jaxlib's headers, 0 without them; XLA refuses libraries for a later one.

    Raises CannotBuild without jaxlib.
    """
    header = _headers() / "xla" / "ffi" / "api" / "c_api.h"
    found = re.search(r"define XLA_FFI_API_MINOR (\d+)", header.read_text()) if header.is_file() else None
    return 0 if found is None else int(found[1])


def _headers() -> Path:
    spec = find_spec("jaxlib")
    if spec is None or not spec.submodule_search_locations:
        raise CannotBuild("jaxlib is not installed")
    return Path(spec.submodule_search_locations[0]) / "include"


def compiler() -> str:
    """Return the C++ compiler: $CXX, or g++. Raises CannotBuild without one, and if this is not x86-64 Linux."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise CannotBuild(f"they are written for x86-64 Linux, and this is {sys.platform} {platform.machine()}")
    wanted = os.environ.get("CXX", "g++")
    found = shutil.which(wanted)
    if found is None:
        raise CannotBuild(f"there is no C++ compiler ({wanted})", "install g++, or name a C++ compiler in CXX")
    return found


def kernel_command(level: str, output: Path, *options: str) -> list[str]:
    """Return the command that compiles the kernels for one set of instructions; options come last."""
    flags = (*_COMMON, *_QUIET, *_LEVELS[level], *options, f"-DKERNELS=kernels_{level}")
    return [compiler(), *flags, "-c", str(SOURCES / _SOURCES.get(level, "kernels.cc")), "-o", str(output)]


def build(target: Path = LIBRARY) -> None:
    """Compile the library into `target`, which appears whole or not at all. Raises CannotBuild."""
    headers = _headers()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        defined = f'-DJSWA_DIGEST="{digest_of_sources()} ffi {interface()}"'
        of_xla = (*_COMMON, "-O1", defined, "-isystem", str(headers), "-c", str(SOURCES / "ffi.cc"))
        commands = [[compiler(), *of_xla, "-o", str(folder / "ffi.o")]]  # the longest comes first
        commands += [kernel_command(level, folder / f"{level}.o") for level in _LEVELS]
        with ThreadPoolExecutor(max(1, os.cpu_count() or 1)) as pool:
            list(pool.map(_run, commands))
        objects = [str(folder / f"{level}.o") for level in (*_LEVELS, "ffi")]
        exported = folder / "exported"
        exported.write_text("{ global: jswa_*; local: *; };")
        made = target.with_name(f"{target.name}.{os.getpid()}.new")
        link = (
            "-shared",
            "-s",
            "-Wl,--gc-sections",
            f"-Wl,--version-script={exported}",
            "-static-libstdc++",
            "-static-libgcc",
        )
        _run([compiler(), *link, "-o", str(made), *objects])
        os.replace(made, target)


def _run(command: list[str]) -> None:
    remedy = "name another C++ compiler in CXX; python -m pallas_kernels.cpu.build shows all that this one says"
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CannotBuild(f"the compiler fails: {error}", remedy) from error
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        first = next((line for line in lines if "error" in line), f"it ends with status {done.returncode}")
        raise CannotBuild(f"the compiler fails: {first[:300]}", remedy, f"{' '.join(command)}\n{done.stderr[:4000]}")


def main() -> None:
    """Compile the library into the package. With --optional, a machine that cannot is told so, and does not fail."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optional", action="store_true", help="status 0 where it cannot be compiled")
    options = parser.parse_args()
    try:
        build()
        print(f"CPU kernels are built: {LIBRARY}")
    except CannotBuild as error:
        print(f"no CPU kernels, jswa runs XLA's: {error}", file=sys.stderr)
        sys.exit(0 if options.optional else 1)


if __name__ == "__main__":
    main()
