"""`jswa doctor`: what this machine has, what jswa will run on, whether its kernels are right, and what to do if not."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jswa import __version__
from jswa.errors import JswaError, install
from jswa.kernels import reason_of

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "safetensors", "tokenizers", "huggingface-hub", "orbax-checkpoint")
_GIB = 2**30
# Sizes that the kernels of every GPU take: a window, sinks, a full layer, and experts.
_MODEL: dict[str, Any] = {
    "model_type": "gpt_oss", "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 256,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024,
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 128, "num_local_experts": 4,
    "num_experts_per_tok": 2, "max_position_embeddings": 4096, "rope_theta": 150000, "attention_bias": True,
    "tie_word_embeddings": False, "eos_token_id": 2,
}  # fmt: skip
_OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 256,
    "kv_cache_memory_bytes": 2**24, "cudagraph_capture_sizes": (2, 64),
}  # fmt: skip


class Finding(NamedTuple):
    """A line of the report.

    Attributes:
        advice: what to do; empty if all is well.
        rows: of a table below the line.
    """

    subject: str
    found: str
    advice: str = ""
    level: Literal["ok", "note", "wrong"] = "ok"
    rows: Sequence[Sequence[str]] = ()

    def __str__(self) -> str:
        """The finding as a line, with the advice and the table below it, whose columns are aligned."""
        lines = [f"{self.level:<6} {self.subject}: {self.found}"]
        lines += [f"       → {self.advice}"] if self.advice else []
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        cells = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in self.rows]
        return "\n".join([*lines, *(f"       {'  '.join(row)}".rstrip() for row in cells)])


def examine(say: Callable[[str], None]) -> Iterator[Finding]:
    """Yield the findings, each as soon as it is known; the last ones compile and run a small model.

    Args:
        say: is given a line before a finding that takes time.
    """
    yield from of_packages()
    driver = nvidia_driver()
    if driver:
        yield Finding("NVIDIA driver", driver)
    import jax

    try:
        devices: Sequence[jax.Device] = jax.local_devices()
    except RuntimeError as error:
        yield _wrong(
            "devices", _line(error), "JAX_PLATFORMS names a platform that is not there, or the driver is too old"
        )
        return
    yield from of_devices(devices, driver)
    on_gpu = devices[0].platform == "gpu"
    if on_gpu:
        yield from of_compiler()
    yield from of_cache()
    lacking = ""
    if devices[0].platform == "cpu":
        library = of_library(say)
        yield library
        lacking = "" if library.level == "ok" else library.found
    say("compiling and running a small model (half a minute the first time)")
    yield of_kernels(devices[0], lacking)


def nvidia_driver() -> str:
    """Return the version of the NVIDIA driver and its GPUs, as far as this machine tells; empty if there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        asked = [tool, "--query-gpu=driver_version,name,memory.free,memory.total", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip():
            return "; ".join(line.strip() for line in done.stdout.strip().splitlines())
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"Module\s+(?:for \S+\s+)?([\d.]+)", path.read_text()) if path.exists() else None
    return found[1] if found else ""


def of_packages() -> Iterator[Finding]:
    """Yield versions, and extras that are missing."""
    yield Finding("jswa", f"{__version__}, Python {sys.version.split()[0]} on {sys.platform}")
    yield Finding("packages", ", ".join(f"{name} {installed(name)}" for name in PACKAGES))
    if importlib.util.find_spec("fastapi") is None:
        yield Finding("server", "not installed", f"for `jswa serve`: {install('server')}", "note")


def installed(package: str) -> str:
    """Return a package's version, or "(not installed)"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def of_devices(devices: Sequence[Any], driver: str) -> Iterator[Finding]:
    """Yield the devices and their memory; `driver`: of NVIDIA, empty without one."""
    for device in devices:
        stats = device.memory_stats() or {} if device.platform == "gpu" else {}
        if "bytes_limit" in stats:
            free = (stats["bytes_limit"] - stats.get("bytes_in_use", 0)) / _GIB
            memory = f", {free:.1f} of {stats['bytes_limit'] / _GIB:.1f} GiB free for jax"
        else:
            memory = f", {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / _GIB:.1f} GiB of memory"
        yield Finding(f"device {device.id}", f"{device.device_kind} ({device.platform}){memory}")
    if driver and devices[0].platform == "cpu":
        yield _wrong("devices", "this machine has an NVIDIA GPU that jax does not use", install("cuda13", "cuda12"))


def of_compiler() -> Iterator[Finding]:
    """Yield the compilers of kernels for NVIDIA GPUs."""
    from jswa.exec.compile.ptxas import find_ptxas, prefer_packaged

    prefer_packaged()
    found = find_ptxas()
    if found is None:
        yield _wrong("ptxas", "not found", f"the extra has one: {install('cuda13', 'cuda12')}")
    elif found.is_wrong:
        yield _wrong("ptxas", f"{found} gives wrong code", f"a newer one: {install('cuda13', 'cuda12')}")
    else:
        yield Finding("ptxas", str(found))
    if importlib.util.find_spec("jax_triton") is None:
        yield Finding(
            "jax-triton",
            "not installed",
            f"for experts, and for GPUs other than Hopper: {install('cuda13', 'cuda12')}",
            "note",
        )


def of_cache() -> Iterator[Finding]:
    """Yield the folder of models from the hub."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    there = next(path for path in (folder, *folder.parents) if path.exists())
    yield Finding("downloads", f"to {folder}, {shutil.disk_usage(there).free / _GIB:.1f} GiB free")


def of_library(say: Callable[[str], None]) -> Finding:
    """Find the library of CPU kernels; it is built if there is none. Without it `found` says why."""
    from pallas_kernels.cpu import library
    from pallas_kernels.cpu.build import CannotBuild
    from pallas_kernels.cpu.first_use import provide

    try:
        path = provide(say)
        library.digest()
    except CannotBuild as error:
        return Finding("CPU kernels", error.why, error.remedy, "wrong" if error.remedy else "note")
    except library.NoLibrary as error:
        return _wrong("CPU kernels", str(error), "delete that file: jswa builds another")
    return Finding("CPU kernels", str(path))


def of_kernels(device: Any, lacking: str = "") -> Finding:
    """Start an engine on a small model with random weights, which checks its kernels on a GPU, and generate tokens.

    Args:
        lacking: why there is no library of CPU kernels; empty if there is one.
    """
    from jswa.building.machine import facts_of
    from jswa.config import EngineConfig
    from jswa.llm import LLM

    options = {**_OPTIONS, "kernels": "xla"} if lacking else _OPTIONS  # else the engine tries to build it once more
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_MODEL))
        try:
            with LLM(folder, **options) as llm:
                llm.generate([[1, 2, 3]], temperature=0, max_tokens=4, ignore_eos=True, use_tqdm=False)
                chosen = llm.engine.kernels.table()
        except JswaError as error:
            return _wrong("kernels", _line(error), "run with --kernels xla until it is mended")
    facts = facts_of(EngineConfig(**options), device)._replace(no_library=lacking)
    agree = "each agrees with XLA on this GPU; " if facts.platform == "gpu" else ""
    rows = [(operation, name, reason_of(operation, name, facts)) for operation, name in chosen.items()]
    return Finding("kernels", f"{agree}a small model runs", rows=rows)


def _wrong(subject: str, found: str, advice: str) -> Finding:
    return Finding(subject, found, advice, "wrong")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def show_line(line: str) -> None:
    """Print a line at once, also where the output is no terminal."""
    print(line, flush=True)


def report(show: Callable[[str], None] = show_line) -> int:
    """Show all findings, each as soon as it is known; return 1 if something is wrong, else 0."""
    wrong = False
    for finding in examine(lambda line: show(f"       {line}")):
        show(str(finding))
        wrong |= finding.level == "wrong"
    return int(wrong)


def versions() -> list[str]:
    """Return the lines of `jswa env`: versions of jswa and its dependencies, and the devices."""
    import jax

    from jswa.exec.compile.ptxas import find_ptxas

    lines = [f"jswa {__version__}, python {sys.version.split()[0]} on {sys.platform}"]
    for name in ("jax", "jaxlib", "flax", "numpy", "safetensors", "tokenizers", "orbax-checkpoint", "jax-triton"):
        try:
            lines.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            lines.append(f"{name} not installed")
    ptxas = find_ptxas()
    lines += [] if ptxas is None else [str(ptxas)]
    return [*lines, *(f"device {device.id}: {device.device_kind} ({device.platform})" for device in jax.devices())]
