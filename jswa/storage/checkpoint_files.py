"""Open the files of a checkpoint, whose author may have made them to do harm.

A file must be a regular one: to open a pipe would block for ever, to read a device would never end. A link must lead
into the checkpoint itself. Otherwise any file of this machine could become part of a checkpoint, and the server shows
parts of it to its clients.
"""

import os
import stat
from contextlib import ExitStack
from io import FileIO
from pathlib import Path

from jswa.errors import CheckpointError

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_ADVICE = "a link must lead to a file of the same checkpoint; put a copy, or a hard link, in its place"


def is_there(path: Path) -> bool:
    """Return whether a checkpoint has an entry of this name, be it a file or a link to nothing."""
    return os.path.lexists(path)


def is_folder(path: Path) -> bool:
    """Return whether a path leads to a folder. One that is too long does not; `Path.is_dir` raises OSError for it."""
    return os.path.isdir(path)


def read_into(view: memoryview, descriptor: int, offset: int, where: str) -> None:
    """Fill a buffer with bytes of a file from an offset on.

    Raises CheckpointError that begins with `where` if the file is too short or cannot be read.
    """
    done = 0
    while done < len(view):
        try:
            count = os.preadv(descriptor, [view[done:]], offset + done)
        except OSError as error:
            raise CheckpointError(f"{where} cannot be read: {error}") from error
        if count == 0:
            raise CheckpointError(f"{where} cannot be read: the file is shorter than it was")
        done += count


def open_file(path: Path, folder: Path | None = None) -> FileIO:
    """Open a regular file of a checkpoint, without a buffer. The caller closes it.

    Args:
        folder: the checkpoint's; by default the one that has the file. It may itself be a link.

    Raises CheckpointError that names the file if it is missing, is not a regular file, or cannot be read, and if a
    link on the way to it leads out of the folder. In the hub's cache, links of a snapshot lead to the blobs next to it.
    """
    try:
        root = Path(os.path.realpath(path.parent if folder is None else folder, strict=True))
        real = Path(os.path.realpath(path, strict=True))
        home = next((home for home in (root, _blobs(root, real)) if home is not None and home in real.parents), None)
        if home is None:
            raise CheckpointError(f"{path} leads to a file outside the checkpoint {root}: {_ADVICE}")
        descriptor = _open_below(home, real.relative_to(home).parts)
    except FileNotFoundError as error:
        what = "is a link to a file that does not exist" if path.is_symlink() else f"is missing in {path.parent}"
        raise CheckpointError(f"{path.name} {what}") from error
    except (OSError, ValueError) as error:  # ValueError: a name with a zero character
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


def read_file(path: Path, most: int, folder: Path | None = None) -> bytes:
    """Return the bytes of a file of a checkpoint, at most `most`; see `open_file`. Raises CheckpointError."""
    with open_file(path, folder) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise CheckpointError(f"{path} has {size} bytes: must have at most {most}")
        try:
            return b"".join(iter(lambda: file.read(min(size - file.tell(), most)), b""))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error


def _blobs(root: Path, real: Path) -> Path | None:
    """Return the folder of a file to which a snapshot of the hub's cache may link, if the file is one of its blobs.

    The cache has `models--OWNER--NAME/snapshots/COMMIT/FILE`, a link to `models--OWNER--NAME/blobs/HASH`.
    """
    homes = (above.parent / "blobs" for above in root.parents if above.name == "snapshots")
    return real.parent if real.parent in homes else None


def _open_below(home: Path, names: tuple[str, ...]) -> int:
    """Open a file below a folder by the names on the way. No name may be a link: one that is has just been put there.

    The file's descriptor is the caller's. To open a pipe does not wait for a writer.
    """
    with ExitStack() as stack:
        at = os.open(home, _READ | os.O_DIRECTORY)
        stack.callback(os.close, at)
        for name in names[:-1]:
            at = os.open(name, _READ | os.O_DIRECTORY, dir_fd=at)
            stack.callback(os.close, at)
        return os.open(names[-1], _READ | os.O_NONBLOCK, dir_fd=at)
