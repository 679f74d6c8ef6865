"""Write a GGUF checkpoint as the Hugging Face folder that it stands for, with its weights in safetensors."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from jaxtyping import Shaped
from safetensors.numpy import save_file

from jswa.gguf.checkpoint import read_checkpoint
from jswa.gguf.file.types import PLAIN
from jswa.gguf.made import Made, Turned, read_made
from jswa.gguf.pointer import POINTER
from jswa.storage.checkpoint_files import open_file, read_file

_SHARD = 2**31  # bytes, all of which are in memory at once
_CHUNK = 2**24  # numbers that are read at a time
_SHORT = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_MOST_JSON = 2**27
Write = Callable[[Path], None]


def exporter(view: Path, gguf: Path, dtype: str) -> tuple[Write, int]:
    """Return a function that fills a folder, and the bytes of the weights that it will write.

    Args:
        view: the folder that the GGUF file stands for; its JSON files are copied.
        dtype: of the numbers: float32, bfloat16 or float16. Packed tensors stay as they are.

    Raises CheckpointError as `read_checkpoint` does; the function raises it too, and OSError.
    """
    checkpoint = read_checkpoint(gguf, packed=False)
    tensors = checkpoint.tensors
    kinds = {key: made.dtype if made.part != "numbers" else _SHORT[dtype] for key, made in tensors.items()}
    sizes = {key: int(np.prod(made.shape)) * _dtype(kinds[key]).itemsize for key, made in tensors.items()}
    shards = _shards(sizes)

    def write(folder: Path) -> None:
        for path in sorted(view.iterdir()):
            if path.name not in (POINTER, "config.json"):
                (folder / path.name).write_bytes(read_file(path, _MOST_JSON))
        config = {**checkpoint.config, "dtype": dtype}
        (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        named = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
        named = ["model.safetensors"] if len(shards) == 1 else named
        for file, keys in zip(named, shards, strict=True):
            save_file({key: _whole(tensors[key], _dtype(kinds[key])) for key in keys}, folder / file, {"format": "pt"})
            (folder / file).chmod(0o644)  # safetensors makes it readable for this user only
        if len(shards) > 1:
            weight_map = {key: file for file, keys in zip(named, shards, strict=True) for key in keys}
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")

    return write, sum(sizes.values())


def _dtype(kind: str) -> np.dtype:
    return PLAIN[kind] if kind in PLAIN else np.dtype(np.uint8)


def _shards(sizes: dict[str, int]) -> list[list[str]]:
    """Return the tensors of each file, in order."""
    shards: list[list[str]] = [[]]
    size = 0
    for key in sizes:
        if shards[-1] and size + sizes[key] > _SHARD:
            shards.append([])
            size = 0
        shards[-1].append(key)
        size += sizes[key]
    return shards


def _whole(made: Made, dtype: np.dtype) -> Shaped[np.ndarray, "..."]:
    """Return a tensor."""
    columns = made.shape[-1] if made.shape else 1
    rows = int(np.prod(made.shape[:-1], dtype=np.int64)) if len(made.shape) > 1 else 1
    if made.part == "codes":
        rows, columns = rows // made.shape[-2], made.shape[-2] * made.shape[-1]
    out = np.empty((rows, columns), dtype)
    last: dict[Made, Turned] = {}
    with ExitStack() as stack:
        paths = {source.path for source in made.sources}
        files = {path: stack.enter_context(open_file(path)).fileno() for path in paths}
        for begin, end in _steps(rows, max(1, _CHUNK // columns)):
            out[begin:end] = read_made(made, files, begin, end, columns, last).astype(dtype, copy=False)
    return out.reshape(made.shape)


def _steps(rows: int, step: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + step, rows)) for begin in range(0, rows, step))
