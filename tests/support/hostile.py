"""Writing checkpoints that are wrong in one place, and reading which place the loader names."""

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


def sound(folder: Path, *, shards: int = 1) -> Fixture:
    """Write a small sound checkpoint: one layer, untied."""
    fixture = load_fixture("llama_one_layer")
    write_checkpoint(folder, fixture.config, fixture.tensors, shards=shards)
    return fixture


def unpack(path: Path) -> tuple[Header, bytes]:
    """The header and the bytes behind it of a sound file."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header: Header = json.loads(content[8 : 8 + length])
    return header, content[8 + length :]


def pack(path: Path, header: Header | bytes, data: bytes, *, length: int | None = None) -> None:
    """Write a safetensors file of any header, sound or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def edit(path: Path, change: Callable[[Header], object]) -> None:
    """Change the header of a sound file in place."""
    header, data = unpack(path)
    change(header)
    pack(path, header, data)


def edit_json(path: Path, change: Callable[[Header], object]) -> None:
    """Change a JSON file in place."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


# Loads every folder named on the command line within 512 MiB above what the process has then, and 60 seconds each.
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
        said = "loaded"
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    print(json.dumps([folder, said, time.process_time() - start]), flush=True)
"""


def loaded_within_limits(folders: list[Path]) -> dict[str, tuple[str, float]]:
    """What a process of its own says of each folder, and its processor seconds; limits are the operating system's."""
    command = [sys.executable, "-c", _LOADER, *map(str, folders)]
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    outcomes = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(outcomes) == len(folders)
    return {Path(folder).name: (said, seconds) for folder, said, seconds in outcomes}
