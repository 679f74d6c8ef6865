"""Facts about a GPU: its kind, memory, versions, each ptxas that is there, and the time to launch a program on it.

    python -m benchmarks.gpu.facts [--json FILE]

On a GPU, also writes the compiler's description of the device beside FILE. `make gpu-compile` compiles for such a
description: pallas_kernels/tuning/<device>.txtpb.
"""

import argparse
import importlib.metadata
import json
import os
import shutil
import site
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import result_file
from pallas_kernels.attention.tuned import device_name

_ARRAYS = (100, 300, 600)
_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-triton", "triton", "nvidia-cuda-nvcc", "torch", "transformers")
_MEMORY = ("bytes_limit", "bytes_in_use", "largest_free_block_bytes")


def main(words: Sequence[str] | None = None) -> None:
    """Print; write JSON and the description if they are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="result file to write")
    args = parser.parse_args(words)
    device = jax.devices()[0]
    facts: dict[str, Any] = {
        "device": device.device_kind,
        "compute_capability": getattr(device, "compute_capability", None),
        "core_count": getattr(device, "core_count", None),
        "memory": {name: (device.memory_stats() or {}).get(name) for name in _MEMORY},
        "packages": {name: installed(name) for name in _PACKAGES},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "ptxas": {str(path): version(str(path)) for path in compilers()},
        "dispatch_microseconds": {count: dispatch(count) for count in _ARRAYS},
    }
    print(json.dumps(facts, indent=1))
    if args.json:
        result_file.write(args.json, facts)
        if device.platform == "gpu":
            from jaxlib import xla_client

            target = xla_client.get_topology_for_devices(jax.devices()).target_config
            args.json.with_name(f"{device_name()}.txtpb").write_text(str(target))


def dispatch(count: int, repeats: int = 200) -> float:
    """Return microseconds in which the host launches a program that updates `count` arrays in place."""
    state = [jnp.zeros(8) + n for n in range(count)]
    program = jax.jit(lambda state: [x + 1 for x in state], donate_argnums=0).lower(state).compile()
    seconds = []
    for _ in range(repeats):
        jax.block_until_ready(state)  # type: ignore[no-untyped-call]
        start = time.perf_counter()
        state = program(state)
        seconds.append(time.perf_counter() - start)
    return 1e6 * statistics.median(seconds)


def installed(package: str) -> str | None:
    """Return the version of a package; None if it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def compilers() -> list[Path]:
    """Return each ptxas that XLA's plugin may find: those of packages, that of CUDA, and that on the PATH."""
    found = [path for folder in site.getsitepackages() for path in sorted(Path(folder).glob("nvidia/*/bin/ptxas"))]
    found += [Path("/usr/local/cuda/bin/ptxas"), *map(Path, filter(None, [shutil.which("ptxas")]))]
    return [path for path in dict.fromkeys(found) if path.is_file()]


def version(command: str) -> str | None:
    """Return the last line of `command --version`; None if there is no such command."""
    try:
        out = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return out.strip().splitlines()[-1]


if __name__ == "__main__":
    main()
