"""Folders that are written as a whole: what is at a path is replaced by something complete, or stays."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_folder(target: Path, write: Callable[[Path], None], *, mode: int) -> None:
    """Fill a folder beside `target` and put it in its place when it is complete and on the disk.

    The old one is deleted last; after a crash before that it lies beside. Raises what `write` and the system raise, and
    leaves what was there.
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
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
