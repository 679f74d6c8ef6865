"""Saves the prefix cache of an engine and loads it into another: `LLM.save_cache`, `LLM.load_cache`.

`snapshot` turns a tree into texts, `persist` writes and reads them, `restore` publishes them in a tree.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from jswa.cache.keys import root_key
from jswa.cache.moves import origins
from jswa.engine import Engine
from jswa.errors import ConfigError, EngineError, FieldError
from jswa.exec.host_memory import slot_contents
from jswa.exec.host_pages import Contents, SlotRunner
from jswa.exec.programs.transfer import clear_stale
from jswa.model.transformer import Params
from jswa.running.stepping import StepRunner
from jswa.storage import persist
from jswa.storage.identity import Identity, identity
from jswa.storage.page_copies import SlotReading, Writing
from jswa.storage.restore import restore
from jswa.storage.snapshot import Captured, capture

_log = logging.getLogger("jswa")


class Between(Protocol):
    """A function that runs another function between two steps of the engine, and returns its result.

    A program whose steps run in a thread of their own passes one that hands the function to that thread.
    """

    def __call__[T](self, function: Callable[[], T]) -> T:
        """Run a function while no step is planned, launched or applied."""
        ...


@runtime_checkable
class PageRunner(SlotRunner, StepRunner, Protocol):
    """A runner that can save and load the cache."""

    params: Params

    @property
    def kv_dtype(self) -> np.dtype:
        """The dtype of the KV arena."""
        ...

    def prepare_copies(self) -> None:
        """Compile the programs that the copies need; steps may go on meanwhile."""
        ...


def at_once[T](function: Callable[[], T]) -> T:
    """Run a function now. This is a `Between` for callers that run no step meanwhile."""
    return function()


def save_cache(
    engine: Engine, path: str | Path, cache_salt: str = "", lora: str | None = None, *, between: Between = at_once
) -> int:
    """Write the cached text of a salt and an adapter, with its KV, to a folder; return its tokens.

    The calling thread waits, hashes and writes; the engine's steps go on. What is saved is the text that the cache has
    when the call begins. Pages are read between steps, 64 MiB at a time and device at most (or four slots, if these
    are more); a page that is about to be overwritten is read first. A cache at `path` is replaced once the new one is
    complete. Takes host memory for one copy of the saved KV. Saves and loads of one engine wait for each other. Raises
    CacheFileError, and ConfigError if the engine has no prefix cache, sleeps, or shares the model with other hosts.
    """
    runner, layout = _page_runner(engine, cache_salt), engine.layout
    digest = engine.adapter_digest(lora)

    def begin() -> tuple[Captured, Contents, SlotReading]:
        _require_awake(engine)
        cache = engine.scheduler.cache
        taken = capture(cache.prefix, cache.tree_key(root_key(cache_salt, digest)))
        contents = slot_contents(len(taken.slots), layout, runner.kv_dtype)
        sources, total = origins(cache.moves, taken.slots), cache.pool.num_slabs * layout.pages_per_slab
        reading = SlotReading(runner, layout, sources, contents, total)
        engine.stepping.before_launch = reading.before_launch
        return taken, contents, reading

    with _copying(engine):  # the weights do not change either
        facts = cache_identity(engine, runner, cache_salt, digest)
        runner.prepare_copies()
        taken, contents, reading = between(begin)
        while between(reading.more):
            reading.store()
        engine.stepping.before_launch = None
        reading.finish()
    clear_stale(contents, layout, *taken.filled)
    persist.save(path, taken.texts, contents, facts)
    return taken.tokens


def load_cache(
    engine: Engine, path: str | Path, cache_salt: str = "", lora: str | None = None, *, between: Between = at_once
) -> int:
    """Publish a saved cache: the text that the cache of this salt and adapter lacks; return the tokens added.

    The calling thread reads and checks the files; the engine's steps go on. Then the cache gets the text between two
    steps, and pages are written between steps, a few at a time; a row that hits a page first has it written at once.
    Nothing is evicted: if memory is short, the texts used longest ago are left out. Raises CacheFileError, and changes
    nothing, if the saved cache is missing, torn, or of another model, weights, adapter, dtype, block_size, salt or
    version; ConfigError if the engine has no prefix cache, sleeps, or shares the model with other hosts.
    """
    runner = _page_runner(engine, cache_salt)
    digest = engine.adapter_digest(lora)
    if engine.stepping.trace is not None:
        _log.warning("a saved cache was loaded: plans written to JSWA_DUMP_PLANS cannot be replayed")

    def begin() -> tuple[int, Writing]:
        _require_awake(engine)
        cache = engine.scheduler.cache
        engine.stepping.copy_host_pages()  # before other pages are written to the slots that these leave
        done = restore(cache, cache.tree_key(root_key(cache_salt, digest)), texts)
        try:
            # Compaction may have moved pages out of the slots that are written now.
            runner.move(np.array(cache.drain_moves(), np.int32).reshape(-1, 3))
        except BaseException:
            cache.flush()
            raise
        total = cache.pool.num_slabs * engine.layout.pages_per_slab
        writing = Writing(runner, engine.layout, done.slots, contents, done.rows, total)
        engine.stepping.before_launch = writing.before_launch
        return done.tokens, writing

    with _copying(engine):  # the weights do not change either
        facts = cache_identity(engine, runner, cache_salt, digest)
        texts, contents = persist.load(path, facts, engine.layout, runner.kv_dtype, engine.model.vocab_size)
        runner.prepare_copies()
        tokens, writing = between(begin)
        try:
            while between(writing.more):
                pass
        except BaseException:
            between(engine.flush_cache)  # the tree holds pages whose KV was never written
            raise
    return tokens


@contextmanager
def _copying(engine: Engine) -> Iterator[None]:
    """Wait until no other save or load copies pages of the engine; at the end unset the engine's `before_launch`."""
    with engine.copying:
        try:
            yield
        finally:
            engine.stepping.before_launch = None


def _require_awake(engine: Engine) -> None:
    if engine.turnover.level:
        raise ConfigError("sleep", engine.turnover.level, "must be 0: an engine that sleeps has no KV to save or load")


def _page_runner(engine: Engine, salt: str) -> PageRunner:
    if not isinstance(salt, str):
        raise FieldError("cache_salt", salt, "must be a string")
    if not engine.limits.prefix_cache:
        raise ConfigError("prefix_cache", False, "must be True to save or load the cache")
    if engine.hosts is not None:
        nodes = engine.hosts.member.nodes
        raise ConfigError("nnodes", nodes, "must be 1 to save or load the cache: each host has its own part of a page")
    if not isinstance(engine.runner, PageRunner):
        raise EngineError(f"{type(engine.runner).__name__} cannot read and write pages")
    return engine.runner


def cache_identity(engine: Engine, runner: PageRunner, salt: str, adapter: str | None = None) -> Identity:
    """Return the identity that a saved cache must have to be loaded into this engine.

    Args:
        adapter: digest of the LoRA adapter.
    """
    facts = identity(engine.model, runner.params, engine.layout, runner.kv_dtype, engine.limits, salt, adapter or "")
    return facts | {"version": str(persist.VERSION)}
