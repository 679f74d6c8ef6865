"""Saves the prefix cache of an engine and loads it into another: `LLM.save_cache`, `LLM.load_cache`.

`snapshot` turns a tree into arrays, `persist` writes and reads them, `restore` publishes them in a tree.
"""

import logging
from pathlib import Path
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Int, Shaped

from jswa.engine import Engine, StepRunner
from jswa.errors import ConfigError, EngineError, FieldError
from jswa.exec.programs.transfer import clear_stale
from jswa.model.transformer import Params
from jswa.storage import persist
from jswa.storage.restore import restore
from jswa.storage.snapshot import capture, origins

_log = logging.getLogger("jswa")


@runtime_checkable
class PageRunner(StepRunner, Protocol):
    """What saving and loading the cache needs of it, besides. Slots are of 1/m block; contents are by lane."""

    params: Params

    @property
    def kv_dtype(self) -> np.dtype:
        """Of the KV arena."""
        ...

    def move(self, moves: Int[np.ndarray, "M 3"]) -> None:
        """Carry out moves of pages outside of a plan."""
        ...

    def read_slots(self, ids: Int[np.ndarray, " n"]) -> list[Shaped[np.ndarray, "n elems"]]:
        """The contents of slots, as the last launched step leaves them."""
        ...

    def write_slots(
        self, ids: Int[np.ndarray, " n"], contents: list[Shaped[np.ndarray, "m elems"]], rows: Int[np.ndarray, " n"]
    ) -> None:
        """Overwrite each slot with a row of the contents, before the next step."""
        ...


def save_cache(engine: Engine, path: str | Path, cache_salt: str = "", lora: str | None = None) -> int:
    """Write the cached text of a salt and an adapter, with its KV, to a folder; return its tokens.

    Call it between two steps: of running requests it saves the text that the cache has by then. A cache at `path` is
    replaced once the new one is complete. Takes host memory for one copy of the saved KV. Raises CacheFileError, and
    ConfigError if the engine has no prefix cache or shares the model with other hosts.
    """
    runner = _page_runner(engine, cache_salt)
    cache, layout = engine.scheduler.cache, engine.layout
    taken = capture(cache.prefix, engine.adapter_root(lora, cache_salt)[1])
    contents = runner.read_slots(origins(cache.moves, taken.slots))
    filled, local = taken.snapshot.filled(layout.page_size), taken.snapshot.local
    clear_stale(contents, layout, filled[: len(filled) if layout.full else 0], filled[local])
    persist.save(path, taken.snapshot, contents, cache_identity(engine, runner, cache_salt, lora))
    return taken.tokens


def load_cache(engine: Engine, path: str | Path, cache_salt: str = "", lora: str | None = None) -> int:
    """Publish a saved cache: the text that the cache of this salt and adapter lacks; return the tokens added.

    Call it between two steps. Nothing is evicted: if memory is short, the texts used longest ago are left out. Raises
    CacheFileError, and changes nothing, if the saved cache is missing, torn, or of another model, weights, adapter,
    dtype, block_size, salt or version; ConfigError if the engine has no prefix cache or shares the model with other
    hosts.
    """
    runner, cache = _page_runner(engine, cache_salt), engine.scheduler.cache
    root = engine.adapter_root(lora, cache_salt)[1]
    wanted = cache_identity(engine, runner, cache_salt, lora)
    snapshot, contents = persist.load(path, wanted, engine.layout, runner.kv_dtype, engine.model.vocab_size)
    if engine.trace is not None:
        _log.warning("a saved cache was loaded: plans written to JSWA_DUMP_PLANS cannot be replayed")
    done = restore(cache, root, snapshot)
    try:
        # Compaction may have moved pages out of the slots that are written now.
        runner.move(np.array(cache.drain_moves(), np.int32).reshape(-1, 3))
        runner.write_slots(done.slots, contents, done.rows)
    except BaseException:
        cache.flush()  # the tree holds pages whose KV was never written
        raise
    return done.tokens


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


def cache_identity(engine: Engine, runner: PageRunner, salt: str, lora: str | None = None) -> persist.Identity:
    """Return what a saved cache must agree with to be loaded into this engine."""
    limits = engine.limits
    # Bits depend on the shape of the step too, and on the compiler.
    bits = f"{limits.max_rows} rows, {limits.max_tokens} tokens, jax {jax.__version__}, {jax.devices()[0].device_kind}"
    return persist.identity(
        engine.model,
        runner.params,
        engine.layout,
        runner.kv_dtype,
        salt,
        deterministic=bits if limits.one_bucket else "",
        adapter="" if lora is None else engine.adapters[lora],
    )
