"""Loads the library of CPU kernels and tells XLA of its functions."""

import ctypes
import threading
from functools import cache

import jax

_FUNCTIONS = (
    *("jswa_product", "jswa_experts", "jswa_mixture", "jswa_gated"),
    *("jswa_attention", "jswa_join", "jswa_rotate", "jswa_sums", "jswa_shares"),
)
_lock = threading.Lock()


class NoLibrary(Exception):
    """The CPU kernels cannot be used here: the message says why."""


def digest() -> str:
    """Load the library if it is not loaded, and return the digest of the sources that it is built from.

    Programs that call it must not be loaded before. Raises NoLibrary if there is none that is built from these sources.
    """
    return _loaded()[1]


def available() -> bool:
    """Return whether the library is there and loaded."""
    try:
        digest()
    except NoLibrary:
        return False
    return True


@cache
def has_quads() -> bool:
    """Return whether this processor multiplies integers of 4 and 8 bits in quads. Raises NoLibrary."""
    return bool(_loaded()[0].jswa_has_quads())


def _loaded() -> tuple[ctypes.CDLL, str]:
    with _lock:
        return _load()


@cache
def _load() -> tuple[ctypes.CDLL, str]:
    """Return the library and its digest. Raises NoLibrary, each time anew, since it may be built later."""
    from pallas_kernels.cpu.first_use import find  # here: who reads a step need not know how the library is built

    path = find()
    if path is None:
        raise NoLibrary("it is not built from these sources: python -m pallas_kernels.cpu.build")
    try:
        library = ctypes.CDLL(str(path))
        library.jswa_digest.restype = ctypes.c_char_p
        built: str = library.jswa_digest().decode()
        functions = {name: jax.ffi.pycapsule(getattr(library, name)) for name in _FUNCTIONS}  # type: ignore[no-untyped-call]
    except (OSError, AttributeError) as error:
        raise NoLibrary(f"{path} cannot be loaded: {error}") from error
    for name, function in functions.items():
        jax.ffi.register_ffi_target(name, function, platform="cpu")
    return library, built
