"""Engines of the tests that save and load a prefix cache."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from jswa.llm import LLM
from tests.support.prefix.saved import ENDS, GREEDY, STORY, turn
from tests.support.tiny import SHAPES


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """Return the engine that saves, with a conversation of two turns and a few other texts in its cache."""
    with LLM("tiny", **SHAPES) as model:
        first = turn(model, STORY)
        turn(model, first + ENDS[0])
        model.generate([STORY + end for end in ENDS], **GREEDY)
        yield model


@pytest.fixture(scope="session")
def later() -> Iterator[LLM]:
    """Return an engine that was started later; its cache is empty at the start of each test."""
    with LLM("tiny", **SHAPES) as model:
        yield model


@pytest.fixture
def emptied(later: LLM) -> None:
    """Empty the cache of the engine that was started later."""
    later.flush_cache()


@pytest.fixture(scope="session")
def saved(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a saved cache; tests damage copies of it."""
    path = tmp_path_factory.mktemp("persist") / "cache"
    assert llm.save_cache(path) > 250
    return path
