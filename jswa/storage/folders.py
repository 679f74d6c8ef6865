"""Write a folder atomically: it replaces the folder that was there only when it is complete."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_folder(target: Path, write: Callable[[Path], None], *, mode: int) -> None:
    """Let `write` fill a new folder next to `target`, and move it to `target` when it is complete and on disk.

    The old folder is deleted last; after a crash before that, it is still next to `target`, as `.NAME.….old`. Raises
    what `write` and the file system raise; then `target` is unchanged.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        write(staging)
        staging.chmod(mode)
        for path in [staging, *staging.rglob("*")]:
            _sync(path)
        _replace(target, staging)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _replace(target: Path, staging: Path) -> None:
    if target.exists() and any(target.iterdir()):
        old = staging.with_name(f"{staging.name}.old")
        target.rename(old)
        try:
            staging.rename(target)
        except OSError:
            old.rename(target)
            raise
        _sync(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    else:
        staging.rename(target)
        _sync(target.parent)


def _sync(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
