"""Invalid checkpoints: helpers that damage a valid checkpoint, and a loader with limited memory and time."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jswa.storage.json_object import MAX_BYTES, MAX_VALUES
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


def weight_bombs(header: Header, data: bytes) -> dict[str, Callable[[Path], object]]:
    """Return writers of weight files that would exhaust memory or time if the loader trusted them."""

    def values(unit: bytes, count: int) -> Callable[[Path], object]:
        return lambda path: pack(path, b'{"a": [' + unit * count + b"1]}", data)

    def sparse(length: int, start: bytes, size: int) -> Callable[[Path], object]:
        def write(path: Path) -> None:
            pack(path, start, b"", length=length)
            os.truncate(path, size)

        return write

    wide_text = f'{{"a": "\U0001f600{"x" * (MAX_BYTES - 20)}"}}'
    wide = {"dtype": "F32", "shape": [2**34], "data_offsets": [0, 2**36]}
    scalar = {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}
    alone = json.dumps({NORM: wide}).encode()
    return {
        "lists": values(b"[],", 8_000_000),
        "nested": values(b"[", 24_000_000),
        "the maximum of lists": values(b"[],", MAX_VALUES // 2 - 10),
        "the maximum of strings": values(b'"\\u1234\\u1234",', MAX_VALUES - 10),
        "a long string of wide characters": lambda path: pack(path, wide_text.encode(), data),
        "zeros": sparse(MAX_BYTES, b"{", MAX_BYTES + 8),
        "endless": sparse(2**64 - 1, b"{}", 2**36),
        "one wide tensor": sparse(len(alone), alone, 8 + len(alone) + 2**36),
        "a product beyond 64 bits": lambda path: pack(path, header | {NORM: wide | {"shape": [2**32] * 4}}, data),
        "long numbers": lambda path: pack(path, header | {NORM: wide | {"shape": [9**4500] * 3000}}, data),
        "many tensors": lambda path: pack(path, dict.fromkeys(map(str, range(150_000)), scalar), bytes(4)),
    }


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
