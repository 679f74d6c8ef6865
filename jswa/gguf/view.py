"""The folder that a GGUF checkpoint stands for: config.json and the tokenizer's files, and where the weights are.

A view is a small folder in jswa's own cache, made anew if the GGUF files change. All code reads it like any folder;
only the readers of tensors ask `pointer.pointed` for the files.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from jswa.errors import CheckpointError
from jswa.gguf.checkpoint import Checkpoint, read_checkpoint
from jswa.gguf.file.header import Value
from jswa.gguf.file.names import shard_names
from jswa.gguf.outline import Source, write_outlines
from jswa.gguf.pointer import POINTER, home, identity, maker, pointer_of
from jswa.storage.checkpoint_files import open_file
from jswa.storage.folders import write_folder


def view_of(path: Path) -> Path:
    """Return the folder that a GGUF checkpoint stands for, of which one file is given.

    Raises CheckpointError or UnsupportedModel as `read_checkpoint` does, and CheckpointError if the cache's folder
    cannot be written.
    """
    path = _reachable(path)
    paths = [path.with_name(name) for name in shard_names(path.name)]
    pointer = {"maker": maker(), "files": [identity(one) for one in paths]}
    folder = _folder_of(os.fsencode(paths[0]), path)
    if pointer_of(folder) != pointer:
        files = files_of(read_checkpoint(path))
        _write(folder, {**files, POINTER: json.dumps(pointer)})
    return folder


def preview_of(files: Sequence[tuple[str, Source]], key: str) -> Path:
    """Return a folder with the JSON files of a GGUF checkpoint that is elsewhere; it has no weights.

    Args:
        files: name and content of each file, in order.
        key: tells this checkpoint from all others.

    Raises what `view_of` and `Source.read` raise.
    """
    with tempfile.TemporaryDirectory() as scratch:
        paths = [Path(scratch) / Path(name).name for name, _ in files]
        write_outlines(paths, [source for _, source in files])
        found = files_of(read_checkpoint(paths[0]))
    folder = _folder_of(key.encode(), paths[0])
    _write(folder, found)
    return folder


def _folder_of(key: bytes, path: Path) -> Path:
    return home() / f"{path.stem[:64]}-{hashlib.sha256(key).hexdigest()[:16]}"


def files_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the contents of the view's JSON files by name. Raises CheckpointError for a tokenizer that is not read."""
    files = {"config.json": json.dumps(checkpoint.config, indent=2)}
    if checkpoint.generation:
        files["generation_config.json"] = json.dumps(checkpoint.generation, indent=2)
    return files | _tokenizer(checkpoint.metadata)


def _tokenizer(metadata: Mapping[str, Value]) -> dict[str, str]:
    from jswa.gguf.tokenizer import tokenizer_files

    found = tokenizer_files(metadata)
    return {"tokenizer.json": found.tokenizer, "tokenizer_config.json": json.dumps(found.config, indent=2)}


def _reachable(path: Path) -> Path:
    """Return the absolute path of a file; of a link that leads out of its folder, where it leads.

    The user has named the file, so it may be a link to anywhere. Links of the hub's cache keep their names.
    """
    absolute = Path(os.path.abspath(path))
    try:
        open_file(absolute).close()
    except CheckpointError:
        return Path(os.path.realpath(path))
    return absolute


def _write(folder: Path, files: Mapping[str, str]) -> None:
    def write(staging: Path) -> None:
        for name, text in files.items():
            (staging / name).write_text(text, encoding="utf-8")

    try:
        write_folder(folder, write, mode=0o700)
    except OSError as error:
        limit = "name a folder that can be written with JSWA_COMPILATION_CACHE"
        raise CheckpointError(f"{folder} cannot be written: {error}: {limit}") from error
