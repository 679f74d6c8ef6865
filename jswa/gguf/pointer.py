"""Which GGUF files a folder stands for: views are folders in jswa's own cache with a file that names them.

A folder elsewhere points nowhere, whatever it has: otherwise a checkpoint could make any file of this machine part of
itself.
"""

import hashlib
import os
from functools import cache
from pathlib import Path
from typing import Any

from jswa.env import Switches
from jswa.errors import CheckpointError
from jswa.storage.checkpoint_files import is_there, open_file
from jswa.storage.json_object import read_object

POINTER = "gguf.json"


@cache
def maker() -> str:
    """Return what tells this version of jswa's readers of GGUF files from another: views of others are made anew."""
    found = [(path.name, path.stat()) for path in sorted(Path(__file__).parent.rglob("*.py"))]
    return hashlib.sha256(repr([(name, one.st_size, one.st_mtime_ns) for name, one in found]).encode()).hexdigest()


def home() -> Path:
    """Return the folder of all views: in that of compiled programs, which only this user may write."""
    return (Switches.read().compilation_cache or Path.home() / ".cache" / "jswa") / "gguf"


def pointed(folder: Path) -> Path | None:
    """Return a file of the GGUF checkpoint that a folder stands for; None if the folder is no view.

    Raises CheckpointError if the GGUF files are not those that the view was made of.
    """
    if Path(os.path.realpath(folder)).parent != Path(os.path.realpath(home())):
        return None
    pointer = pointer_of(folder)
    if pointer is None:
        return None
    paths = [Path(str(one["path"])) for one in pointer["files"]]
    for path, known in zip(paths, pointer["files"], strict=True):
        if identity(path) != known:
            raise CheckpointError(f"{path} has changed since {folder} was made of it: start again")
    return paths[0]


def identity(path: Path) -> dict[str, object]:
    """Return what tells one version of a file from another. Raises CheckpointError."""
    with open_file(path) as file:
        found = os.fstat(file.fileno())
    return {"path": str(path), "size": found.st_size, "mtime": found.st_mtime_ns}


def pointer_of(folder: Path) -> dict[str, Any] | None:
    """Return what a view was made of; None if there is no view, or one of another version of jswa."""
    if not is_there(folder / POINTER):
        return None
    pointer = read_object(folder / POINTER)
    return pointer if pointer.get("maker") == maker() else None
