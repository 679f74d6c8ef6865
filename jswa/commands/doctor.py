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
from jswa.errors import JswaError

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
    """A line of the report. `advice`: what to do; empty if all is well."""

    subject: str
    found: str
    advice: str = ""
    level: Literal["ok", "note", "wrong"] = "ok"

    def __str__(self) -> str:
        """The finding as a line, with the advice below it."""
        line = f"{self.level:<6} {self.subject}: {self.found}"
        return f"{line}\n       → {self.advice}" if self.advice else line


def examine() -> Iterator[Finding]:
    """Yield the findings, each as soon as it is known; the last ones compile and run a small model."""
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
    yield of_kernels(devices[0])


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
        yield Finding("server", "not installed", 'for `jswa serve`: pip install "jswa[server]"', "note")


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
        yield _wrong("devices", "this machine has an NVIDIA GPU that jax does not use", 'pip install "jswa[cuda13]"')


def of_compiler() -> Iterator[Finding]:
    """Yield the compilers of kernels for NVIDIA GPUs."""
    from jswa.exec.compile.ptxas import find_ptxas, prefer_packaged

    prefer_packaged()
    found = find_ptxas()
    if found is None:
        yield _wrong("ptxas", "not found", 'pip install "jswa[cuda13]", which has one')
    elif found.is_wrong:
        yield _wrong("ptxas", f"{found} gives wrong code", 'pip install --upgrade "jswa[cuda13]"')
    else:
        yield Finding("ptxas", str(found))
    if importlib.util.find_spec("jax_triton") is None:
        yield Finding(
            "jax-triton",
            "not installed",
            'for experts, and for GPUs other than Hopper: pip install "jswa[cuda13]"',
            "note",
        )


def of_cache() -> Iterator[Finding]:
    """Yield the folder of models from the hub."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    there = next(path for path in (folder, *folder.parents) if path.exists())
    yield Finding("downloads", f"to {folder}, {shutil.disk_usage(there).free / _GIB:.1f} GiB free")


def of_kernels(device: Any) -> Finding:
    """Start an engine on a small model with random weights, which checks its kernels on a GPU, and generate tokens."""
    from jswa.llm import LLM

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_MODEL))
        try:
            with LLM(folder, **_OPTIONS) as llm:
                llm.generate([[1, 2, 3]], temperature=0, max_tokens=4, ignore_eos=True, use_tqdm=False)
                chosen = llm.engine.kernels.table()
        except JswaError as error:
            return _wrong("kernels", _line(error), "run with --kernels xla until it is mended")
    plain = "plain XLA, as on any CPU" if chosen["attention"] == "xla" else "from the library of CPU kernels"
    checked = "each agrees with XLA on this GPU" if device.platform == "gpu" else plain
    kernels = ", ".join(f"{operation} {name}" for operation, name in chosen.items())
    return Finding("kernels", f"{kernels}: {checked}; a small model runs")


def _wrong(subject: str, found: str, advice: str) -> Finding:
    return Finding(subject, found, advice, "wrong")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def report(show: Callable[[str], None] = print) -> int:
    """Show all findings; return 1 if something is wrong, else 0."""
    findings = []
    for finding in examine():
        findings.append(finding)
        show(str(finding))
    return int(any(finding.level == "wrong" for finding in findings))


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
