"""The files of a GGUF checkpoint: one, or several that `-00001-of-00003` in their names count."""

from pathlib import Path
from typing import NamedTuple

from jswa.errors import CheckpointError
from jswa.gguf.file.header import Gguf, GgufTensor, read_gguf
from jswa.gguf.file.names import shard_names
from jswa.storage.checkpoint_files import is_there
from jswa.storage.json_object import shown


class Shards(NamedTuple):
    """A checkpoint: the header of its first file, and the tensors of all files by name."""

    first: Gguf
    paths: tuple[Path, ...]
    tensors: dict[str, GgufTensor]


def read_shards(path: Path) -> Shards:
    """Read the headers of all files of a checkpoint, of which one is given.

    Raises CheckpointError that names the file: a file is missing, the files count each other differently, a tensor is
    in two of them, or there are fewer tensors than the files say.
    """
    paths = [path.with_name(name) for name in shard_names(path.name)]
    tensors: dict[str, GgufTensor] = {}
    found: list[Gguf] = []
    for number, one in enumerate(paths):
        if not is_there(one):
            raise CheckpointError(f"{one.name} is missing in {one.parent}: {path.name} is one of {len(paths)} files")
        gguf = read_gguf(one)
        _require(gguf, "split.count", len(paths), 0 if len(paths) == 1 else None)
        _require(gguf, "split.no", number, 0 if len(paths) == 1 else None)
        for name, tensor in gguf.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{tensor.where} is stored twice, first in {tensors[name].path.name}")
            tensors[name] = tensor
        found.append(gguf)
    _require(found[0], "split.tensors.count", len(tensors), len(tensors))
    return Shards(found[0], tuple(paths), tensors)


def _require(gguf: Gguf, key: str, wanted: int, default: int | None) -> None:
    """Raise CheckpointError unless a key of the metadata has the value that the files' names and tensors give."""
    value = gguf.metadata.get(key, default)
    allowed = (1, 0) if (key, wanted) == ("split.count", 1) else (wanted,)
    if value not in allowed or isinstance(value, bool):
        raise CheckpointError(
            f"{gguf.path.name}: {key} = {shown(value)}: must be {wanted}, as the checkpoint's files are"
        )
