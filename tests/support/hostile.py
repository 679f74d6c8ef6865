"""Invalid checkpoints: helpers that damage a valid checkpoint, and a loader with limited memory and time."""

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.parity.load import Fixture, load_fixture
from tests.parity.weights import write_checkpoint

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBED, NORM = "model.embed_tokens.weight", "model.norm.weight"
Header = dict[str, Any]


def write_valid(folder: Path, *, shards: int = 1) -> Fixture:
    """Write a small valid checkpoint with one layer and an untied head."""
    fixture = load_fixture("llama_one_layer")
    write_checkpoint(folder, fixture.config, fixture.tensors, shards=shards)
    return fixture


def unpack(path: Path) -> tuple[Header, bytes]:
    """Return the header of a valid file, and the bytes after it."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header: Header = json.loads(content[8 : 8 + length])
    return header, content[8 + length :]


def pack(path: Path, header: Header | bytes, data: bytes, *, length: int | None = None) -> None:
    """Write a safetensors file with any header, valid or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def edit(path: Path, change: Callable[[Header], object]) -> None:
    """Change the header of a valid file in place."""
    header, data = unpack(path)
    change(header)
    pack(path, header, data)


def edit_json(path: Path, change: Callable[[Header], object]) -> None:
    """Change a JSON file in place."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


# Loads each folder on the command line, with at most 512 MiB more memory than the process has, and 60 s per folder.
_LOADER = """
import json, resource, signal, sys, time
from pathlib import Path
import jax.numpy as jnp
from jswa.model.weights.load import load_checkpoint

def late(*_):
    raise TimeoutError

pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + 2**29
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
signal.signal(signal.SIGALRM, late)
for folder in sys.argv[1:]:
    signal.alarm(60)
    start = time.process_time()
    try:
        load_checkpoint(Path(folder), jnp.dtype("float32"))
        outcome = "loaded"
    except BaseException as error:
        outcome = f"{type(error).__name__}: {error}"
    print(json.dumps([folder, outcome, time.process_time() - start]), flush=True)
"""


def loaded_within_limits(folders: list[Path]) -> dict[str, tuple[str, float]]:
    """Load folders in another process with limited memory; return the outcome and CPU seconds of each."""
    command = [sys.executable, "-c", _LOADER, *map(str, folders)]
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    outcomes = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(outcomes) == len(folders)
    return {Path(folder).name: (outcome, seconds) for folder, outcome, seconds in outcomes}
