"""Result files of the benchmarks that need a GPU, found in a folder by their content."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import result_file
from tools.cases.hub_configs import CONFIGS

File = dict[str, Any]
# What a report can use, by the module that measures it.
STAGES = {
    "cached": "answers behind a cached prefix",
    "experts": "products of the experts",
    "kernels": "attention kernels",
    "torch": "the same in torch",
    "steps": "decode steps and prefill chunks",
    "offline": "throughput of the engine",
    "peer": "throughput of transformers",
}
_FORMATS = {None: "bf16", "none": "bf16", "auto": "bf16", "mxfp4": "mxfp4", "fp8": "fp8"}


@dataclass
class Results:
    """Files by stage, each with its path; `unread`: paths of JSON files of no known stage."""

    stages: dict[str, list[tuple[Path, File]]] = field(default_factory=lambda: {stage: [] for stage in STAGES})
    unread: list[Path] = field(default_factory=list)

    @property
    def missing(self) -> list[str]:
        """Stages without a file."""
        return [stage for stage, files in self.stages.items() if not files]

    @property
    def devices(self) -> list[str]:
        """The devices that jax measured, each once."""
        files = [file for stage in ("experts", "kernels", "steps", "offline") for _, file in self.stages[stage]]
        return list(dict.fromkeys(str(file["device"]) for file in files if "device" in file))


def read_folder(folder: Path) -> Results:
    """Read all JSON files in a folder and below it. Raises ValueError, which names the file, if one is not JSON."""
    found = Results()
    for path in sorted(folder.rglob("*.json")):
        try:
            file = result_file.read(path)
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        stage = stage_of(file)
        if stage is None:
            found.unread.append(path)
        else:
            found.stages[stage].append((path, file))
    return found


def stage_of(file: object) -> str | None:
    """Return the stage that writes such a file; None if none does."""
    if not isinstance(file, Mapping):
        return None
    if isinstance(file.get("attention"), list):
        return "kernels" if "ceilings" in file else "torch"
    named = next((stage for stage in ("cached", "experts") if isinstance(file.get(stage), list)), None)
    if named is not None:
        return named
    if isinstance(file.get("steps"), list) and "roof" in file:
        return "steps"
    if "batched" in file:
        return "offline"
    return "peer" if "output_tokens_per_s" in file else None


def options(file: Mapping[str, Any]) -> dict[str, str]:
    """Return the options in the command of a file's header: {"--hub": "gemma-3-27b", ...}."""
    found: dict[str, str] = {}
    name = ""
    for word in shlex.split(str(file.get("command") or "")):
        if word.startswith("--"):
            name, _, value = word.partition("=")
            found |= {name: value} if value else {}
        elif name:
            found.setdefault(name, word)
    return found


def model_of(path: Path, file: Mapping[str, Any]) -> str | None:
    """Return the name in CONFIGS of the measured model: from the file, its command or its name. None: none of these."""
    named = (file.get("model"), options(file).get("--hub"), path.stem.partition("-")[2])
    return next((name for name in named if isinstance(name, str) and name in CONFIGS), None)


def title_of(path: Path, file: Mapping[str, Any]) -> str:
    """Return what to call the measured model in a table: its name, the one in the command, or the file's."""
    return model_of(path, file) or options(file).get("--model") or path.stem


def formats_of(file: Mapping[str, Any]) -> str | None:
    """Return the name of the storage formats of the measured model; None if the prediction has no such formats.

    Random weights without another choice have 16 bits.
    """
    given = options(file)
    weights = _FORMATS.get(file.get("quantization", given.get("--quantization")))
    in_8_bits = str(file.get("kv_cache_dtype", given.get("--kv-cache-dtype", ""))).startswith("fp8")
    if in_8_bits:
        return "fp8, fp8 KV" if weights == "fp8" else None
    return weights
