"""Finds the library, and compiles it at its first use. Imports no jax.

It lies in the package, or in the user's folder of caches where the package cannot be written. A library of other
sources is not found, nor one for a later interface of XLA than jaxlib's: one in the package holds both, and one of the
user's has the digest of its sources and jaxlib's version in its name.
"""

import errno
import fcntl
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from pallas_kernels.cpu.build import LIBRARY, CannotBuild, build, compiler, digest_of_sources, interface

_OTHERS_WRITE = 0o022


def find() -> Path | None:
    """Return the library that is built from the sources beside this file and that XLA accepts; None if none is."""
    sources = digest_of_sources()
    if LIBRARY.is_file() and _is_accepted(LIBRARY.read_bytes(), sources):
        return LIBRARY
    own = None if sources is None else _own(sources)
    return own if own is not None and own.is_file() and _is_safe(own.parent) else None


def provide(tell: Callable[[str], None]) -> Path:
    """Return the library, built now if there is none. Raises CannotBuild.

    Of several processes one builds it, and the others wait for it.

    Args:
        tell: is given a line before anything that takes time.
    """
    found = find()
    if found is not None:
        return found
    compiler()
    sources = digest_of_sources()
    if sources is None:
        raise CannotBuild("their C++ sources are not installed")
    target = LIBRARY if os.access(LIBRARY.parent, os.W_OK) else _own(sources)
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if target != LIBRARY and not _is_safe(target.parent):
            raise CannotBuild(f"others may write to {target.parent}", f"chmod 700 {target.parent}")
        with _alone(target.with_name(f"{target.name}.lock"), tell):
            if find() is None:
                tell("building the CPU kernels, once for this installation (about half a minute)")
                build(target)
    except OSError as error:
        raise CannotBuild(str(error), "name a folder that can be written in XDG_CACHE_HOME") from error
    return target


def _is_accepted(library: bytes, sources: str | None) -> bool:
    """Whether a library is built from these sources (None: any), for an interface of XLA that jaxlib still has."""
    built = re.search(rb"([0-9a-f]{64}) ffi (\d+)", library)
    if built is None:
        return False
    return (sources is None or built[1] == sources.encode()) and int(built[2]) <= interface()


def _own(sources: str) -> Path:
    """Return the path of the user's own library: the sources and jaxlib, whose headers it is built with, name it."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "jswa" / "kernels" / f"jswa_cpu-{sources[:32]}-jaxlib-{version('jaxlib')}.so"


def _is_safe(folder: Path) -> bool:
    """Whether only this user may write to a folder: to load a library is to run it."""
    status = folder.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_WRITE


@contextmanager
def _alone(lock: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Keep other processes from building until the context ends.

    On a file system without locks they build too, and the last library replaces the others whole.
    """
    with lock.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("another process builds the CPU kernels: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
        yield
