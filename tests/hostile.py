"""Writing checkpoints that are wrong in one place, and reading which place the loader names."""

import json
import struct
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
