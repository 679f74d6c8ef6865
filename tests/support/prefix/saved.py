"""Engines that save and load their prefix cache, and what is in a saved one."""

from pathlib import Path
from typing import Any

import numpy as np

from jswa.llm import LLM
from jswa.storage import persist
from jswa.storage.cache_store import cache_identity
from jswa.storage.identity import Identity
from jswa.storage.snapshot import SavedText

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "use_tqdm": False}
STORY = "Once upon a time there was a little girl who had a cat. The cat was big and liked to play in the garden. " * 2
ENDS = [" One day", " She said", " The dog"]
FLOAT32 = np.dtype("float32")


def turn(model: LLM, text: str, **more: Any) -> str:
    """Return the text with its continuation."""
    answer: str = model.generate(text, **GREEDY, **more)[0].outputs[0].text
    return text + answer


def identity_of(model: LLM, salt: str = "") -> Identity:
    """Return the identity that a saved cache must have for this engine."""
    runner: Any = model.engine.runner
    return cache_identity(model.engine, runner, salt)


def read(model: LLM, path: Path) -> tuple[list[SavedText], list[np.ndarray]]:
    """Return the contents of a saved cache, which is checked."""
    engine = model.engine
    return persist.load(path, identity_of(model), engine.layout, FLOAT32, engine.model.vocab_size)


def held(model: LLM) -> tuple[int, ...]:
    """Return how much the cache holds, and how much of the arena is free."""
    stats, pool = model.cache_stats(), model.stats()
    return stats.full_pages, stats.local_pages, stats.windows, pool.free_slots, pool.cached_slots
