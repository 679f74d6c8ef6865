"""Keeps compiled programs in files, so that a later start neither traces nor compiles them.

    FOLDER/KEY.key        the name of a program; KEY is a digest of all that the program is made from
    FOLDER/KEY.figure     a number that is known of a program once it has been compiled
    FOLDER/NAME.program   a compiled program; NAME is a digest of what XLA compiles, so that an edit of the sources that
                          changes no program costs its tracing only

All are written whole under another name and then renamed; each begins with a digest of its content and its own name,
so that an entry which is torn, or is another's, is compiled anew and replaced. Loading an entry runs it: the folder
must be writable by its user only.
"""

import contextlib
import gc
import hashlib
import logging
import os
import pickle
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

import pallas_kernels
from jswa.exec.compile.ptxas import find_ptxas
from pallas_kernels.cpu import library

_log = logging.getLogger("jswa")
IMPORTED = time.time()  # when this process read the sources
_MOST_BYTES = 2 * 2**30
_MOST_SECONDS = 30 * 86_400.0
_DIGEST = 32  # bytes
_PACKAGES = (
    *("jax", "jaxlib", "flax", "numpy", "ml_dtypes", "jax-triton", "triton"),
    *("jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12"),
)
_VARIABLES = ("XLA_", "JAX_", "PJRT_", "NPROC", "LIBTPU_", "TF_")
# Where jax keeps its own files, and what it logs, changes no program.
_IRRELEVANT = ("cache", "_log_", "logging", "dump", "traceback")
_compiling = threading.Lock()  # on a CPU: a program that two threads compile at once may be written incompletely
# Python runs one thread at a time. Where several trace at once, all end late; where they take turns, the first one is
# compiled by XLA, which needs no Python, while the next is traced.
_tracing = threading.Lock()
_TURN = 2e-4  # seconds
_found = threading.local()  # whether jax's own cache had the program that this thread has just compiled


class ProgramStore:
    """The compiled programs in a folder, for this machine, these devices and these sources.

    Any number of threads and processes may use a folder at once. No error of a file reaches the caller: the program is
    compiled instead. If the folder cannot be written, the log says so once.

    Args:
        folder: made if it is missing.
        devices: of the programs.
        sources: digest of the code that traces the programs.
    """

    def __init__(self, folder: Path, devices: Sequence[jax.Device], sources: str) -> None:
        self._folder = folder
        self._devices = list(devices)
        self._sources = sources
        self._surroundings = _surroundings(self._devices)
        self._writable = True

    def compiled(
        self, what: str, arguments: tuple[Any, ...], options: str, trace: Callable[[], jax.stages.Traced]
    ) -> jax.stages.Compiled:
        """Return a program from the folder, or compile it and keep it there.

        Args:
            what: names the program and every static value that it is made from.
            arguments: arrays or their shapes.
            options: with which XLA compiles it.
            trace: traces it.
        """
        described, key = _described(arguments), self._key(what, arguments, options)
        link = self._read(f"{key}.key")
        known = None if link is None else link.decode()
        program = None if known is None else self._load(known)
        if program is not None:
            return program
        lowered = _lowered(trace)
        # XLA's text lacks the arguments that nothing reads, but a program refuses others of these too.
        name = _digest(self._surroundings, options, described, lowered.as_text(), str(lowered.out_tree))
        with _alone(self._devices[0].platform):
            program = None if name == known else self._load(name)
            if program is None:
                program = self._compile(lowered, name)
        self._write(f"{key}.key", name.encode())
        return program

    def figure(self, what: str, arguments: tuple[Any, ...], options: str, make: Callable[[], int]) -> int:
        """Return a number that follows from a program, from the folder or from `make`; arguments as in `compiled`."""
        name = f"{self._key(what, arguments, options)}.figure"
        found = self._read(name)
        if found is not None:
            return int(found)
        figure = make()
        self._write(name, str(figure).encode())
        return figure

    def _key(self, what: str, arguments: tuple[Any, ...], options: str) -> str:
        return _digest(self._surroundings, self._sources, what, options, _described(arguments))

    def _compile(self, lowered: jax.stages.Lowered, name: str) -> jax.stages.Compiled:
        _found.hit = False
        program = lowered.compile()
        # XLA writes incomplete code of a CPU program that it has not compiled but read from jax's own cache.
        if not _found.hit:
            try:
                content, _, outputs = serialize_executable.serialize(program)
            except (ValueError, NotImplementedError) as error:
                _log.info("a compiled program cannot be kept: %s", error)
            else:
                # A tree definition has no form in a file; a tree of numbers has the same.
                trees = [tree.unflatten(range(tree.num_leaves)) for tree in (program.in_tree, outputs)]
                self._write(f"{name}.program", pickle.dumps((content, *trees)))
        return program

    def _load(self, name: str) -> jax.stages.Compiled | None:
        found = self._read(f"{name}.program")
        if found is None:
            return None
        try:
            content, *trees = pickle.loads(found)  # noqa: S301 - a program is run anyway
            inputs, outputs = (jax.tree.structure(tree) for tree in trees)
            client, devices = self._devices[0].client, self._devices
            program: jax.stages.Compiled = serialize_executable.deserialize_and_load(
                content, inputs, outputs, backend=client, execution_devices=devices
            )
        except Exception as error:  # jaxlib raises many types, and the program can always be compiled
            _log.warning("%s: compiled anew, since it cannot be loaded: %s", self._folder / f"{name}.program", error)
            return None
        return program

    def _read(self, name: str) -> bytes | None:
        """Return the content of an entry; None if it is missing, or not what was written under its name."""
        path = self._folder / name
        try:
            found = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("%s: compiled anew, since it cannot be read: %s", path, error.strerror)
            return None
        digest, content = found[:_DIGEST], found[_DIGEST:]
        if digest != _sealed(name, content):
            _log.warning("%s: compiled anew, since it is torn or belongs to another program", path)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # so that what is used stays
        return content

    def _write(self, name: str, content: bytes) -> None:
        if not self._writable:
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self._folder, suffix=".new")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(_sealed(name, content) + content)
                os.replace(temporary, self._folder / name)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            self._writable = False
            _log.warning("compiled programs are not kept, the next start compiles them anew: %s", error)


def open_store(folder: Path | None, devices: Sequence[jax.Device]) -> ProgramStore | None:
    """Return the store in a folder, and delete what was not used for long; None if there is no folder.

    None too if the sources are not the ones that this process runs: their files are newer, or there are none.
    """
    if folder is None:
        return None
    sources, newest = _digest_of_sources()
    if newest == 0 or newest > IMPORTED:
        why = "jswa has no source files" if newest == 0 else "the sources changed after they were imported"
        _log.info("compiled programs are neither loaded nor kept: %s", why)
        return None
    _listen()
    programs = folder / "programs"
    prune(programs, _MOST_BYTES, _MOST_SECONDS)
    return ProgramStore(programs, devices, sources)


def compiled(
    store: ProgramStore | None,
    what: str,
    function: jax.stages.Wrapped,
    arguments: tuple[Any, ...],
    options: str = "",
) -> jax.stages.Compiled:
    """Compile a jitted function for arguments or their shapes, or take the program from the store.

    Args:
        what, options: see `ProgramStore.compiled`.
    """
    if store is None:
        lowered = _lowered(lambda: function.trace(*arguments))
        with _alone(jax.default_backend()):
            return lowered.compile()
    return store.compiled(what, arguments, options, lambda: function.trace(*arguments))


def _lowered(trace: Callable[[], jax.stages.Traced]) -> jax.stages.Lowered:
    """Trace and lower a program while no other thread does.

    A thread that runs steps gets Python's lock in turns of `_TURN` meanwhile: by default it waits 5 ms, as long as a
    step takes, each time it is back from the device. No garbage is collected until the program is lowered: a collection
    of its many objects holds all threads for 0.1 s.
    """
    with _tracing:
        usual, collects = sys.getswitchinterval(), gc.isenabled()
        sys.setswitchinterval(min(usual, _TURN))
        gc.disable()
        try:
            lowered: jax.stages.Lowered = trace().lower()
        finally:
            if collects:
                gc.enable()
            sys.setswitchinterval(usual)
        return lowered


def _alone(platform: str) -> contextlib.AbstractContextManager[object]:
    """Return what a thread enters while XLA compiles for a platform: on a CPU, whose memory others share, one does."""
    return _compiling if platform == "cpu" else contextlib.nullcontext()


def named(function: Callable[..., Any]) -> str:
    """Name a function, or a partial one with its arguments, for `compiled`."""
    if isinstance(function, partial):
        return f"{named(function.func)} {function.args} {function.keywords}"
    return f"{function.__module__}.{function.__qualname__}"


def prune(folder: Path, most_bytes: int, most_seconds: float) -> None:
    """Delete entries that were not used for `most_seconds`, then those used longest ago, down to `most_bytes`."""
    entries = []
    with contextlib.suppress(OSError):  # a missing folder, or another process that deletes too
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):
                status = entry.stat()
                entries.append((status.st_mtime, status.st_size, entry.path))
    total, now = 0, time.time()
    for used, size, path in sorted(entries, reverse=True):
        total += size
        if total > most_bytes or now - used > most_seconds:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _sealed(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + content).digest()


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _described(arguments: tuple[Any, ...]) -> str:
    """Describe arrays or shapes: their places in the tree, shapes, types and shardings."""
    leaves, tree = jax.tree.flatten(arguments)
    shardings: dict[Any, str] = {}
    lines = [str(tree)]
    for leaf in leaves:
        sharding = getattr(leaf, "sharding", None)
        if sharding not in shardings:
            shardings[sharding] = str(sharding)
        lines.append(f"{leaf.shape} {leaf.dtype} {getattr(leaf, 'weak_type', False)} {shardings[sharding]}")
    return "\n".join(lines)


@cache
def _digest_of_sources() -> tuple[str, float]:
    """Return a digest of all code and tunings that programs are made from, and when the last of them was changed."""
    whole, newest = hashlib.sha256(), 0.0
    for root in (Path(__file__).parents[2], Path(pallas_kernels.__file__ or "").parent):
        for path in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".json")):
            if "_server" in path.parts or "assets" in path.parts:
                continue
            content, newest = path.read_bytes(), max(newest, path.stat().st_mtime)
            whole.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    return whole.hexdigest(), newest


def _surroundings(devices: Sequence[jax.Device]) -> str:
    """Describe what a program depends on beside its sources: packages, machine, devices, options of jax and XLA."""
    first = devices[0]
    client = first.client
    lines = [f"python {sys.version}", *_versions(_PACKAGES), platform.platform(), f"processors {_processors()}"]
    lines += [f"{processor()} {_native()}" if first.platform == "cpu" else str(find_ptxas())]
    lines += [client.platform, client.platform_version, first.device_kind, f"{jax.device_count()} devices"]
    lines += [str([device.id for device in devices])]
    config: dict[str, Any] = jax.config.values
    lines += [f"{name}={config[name]}" for name in sorted(config) if not any(word in name for word in _IRRELEVANT)]
    lines += [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(_VARIABLES) and not any(word in name.lower() for word in _IRRELEVANT)
    ]
    return "\n".join(lines)


def _native() -> str:
    """Load the library of CPU kernels before programs that call it; return its digest, or why there is none."""
    try:
        return library.digest()
    except library.NoLibrary as error:
        return str(error)


def _versions(names: Iterable[str]) -> Iterable[str]:
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            yield f"{name} {version(name)}"


def _processors() -> int:
    """Return the processors that XLA divides the work of a program among."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """Return the model of the processor and the instructions that it has."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
        wanted = ("model name", "flags", "Features", "CPU part", "CPU implementer")
        return "\n".join(line for line in lines if line.startswith(wanted))
    return f"{platform.machine()} {platform.processor()}"


@cache
def _listen() -> None:
    """Have jax say, in the thread that compiles, when it takes a program from its own cache."""

    def heard(event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            _found.hit = True

    jax.monitoring.register_event_listener(heard)
