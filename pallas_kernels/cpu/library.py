"""Loads the library of CPU kernels and tells XLA of its functions."""

import ctypes
import threading
from functools import cache

import jax

from pallas_kernels.cpu.build import LIBRARY, digest_of_sources

_FUNCTIONS = (
    *("jswa_product", "jswa_experts", "jswa_mixture", "jswa_gated"),
    *("jswa_attention", "jswa_join", "jswa_rotate", "jswa_sums", "jswa_shares"),
)
_lock = threading.Lock()


class NoLibrary(Exception):
    """The CPU kernels cannot be used here: the message says why."""


def digest() -> str:
    """Load the library if it is not loaded, and return the digest of the sources that it is built from.

    Programs that call it must not be loaded before. Raises NoLibrary if there is none, or it is not built from the
    sources beside it.
    """
    with _lock:
        found, why = _load()
    if found is None:
        raise NoLibrary(why)
    return found


def available() -> bool:
    """Return whether the library is there and loaded."""
    try:
        digest()
    except NoLibrary:
        return False
    return True


@cache
def has_quads() -> bool:
    """Return whether this processor multiplies codes of 4 bits in quads. Raises NoLibrary."""
    digest()
    return bool(ctypes.CDLL(str(LIBRARY)).jswa_has_quads())


@cache
def _load() -> tuple[str | None, str]:
    """Return the library's digest and an empty string, or None and why there is none."""
    if not LIBRARY.is_file():
        return None, "it is not built: python -m pallas_kernels.cpu.build"
    try:
        library = ctypes.CDLL(str(LIBRARY))
        library.jswa_digest.restype = ctypes.c_char_p
        built: str = library.jswa_digest().decode()
        functions = {name: jax.ffi.pycapsule(getattr(library, name)) for name in _FUNCTIONS}  # type: ignore[no-untyped-call]
    except (OSError, AttributeError) as error:
        return None, f"{LIBRARY.name} cannot be loaded: {error}"
    sources = digest_of_sources()
    if sources is not None and sources != built:
        return None, "it is built from other sources: python -m pallas_kernels.cpu.build"
    for name, function in functions.items():
        jax.ffi.register_ffi_target(name, function, platform="cpu")
    return built, ""
