"""Read parity fixtures without torch or transformers.

`load_fixture(name)` returns a checkpoint (its config and its tensors, drawn again from their seed), a text, and what
transformers computes for that text: its greedy tokens, a sketch of its logits, and log probabilities. The engine's
tests compare with the reference implementation but must run without it.

make_fixtures.py writes the fixtures (`make parity`); archive.py has their file format, sketch.py what a sketch is.
"""

import copy
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.parity.archive import Facts, Recipe, digest, read_arrays, read_facts
from tests.parity.weights import Tensor

FIXTURES = Path(__file__).parent / "fixtures"  # an archive per family
ADAPTERS = Path(__file__).parent / "adapters"  # an archive


@dataclass(frozen=True)
class Fixture:
    """One tiny checkpoint, and what transformers computes with it."""

    name: str
    config: dict[str, Any]  # config.json as transformers 5.23 saves it
    old_config: dict[str, Any] | None  # the same model in the form of older hub repositories
    prompt: NDArray[np.int32]  # [P]
    tokens: NDArray[np.int32]  # [T] the prompt, then greedy tokens
    sketch: NDArray[np.float32]  # [T, COLUMNS] of the logits of one full forward over `tokens`
    log_probs: NDArray[np.float32]  # [T - 1] of each token after the first
    tensors: dict[str, Tensor]  # the checkpoint, by names on disk


@dataclass(frozen=True)
class FixtureAdapter:
    """A LoRA adapter for a fixture's checkpoint, and what PEFT computes with both."""

    config: dict[str, Any]  # adapter_config.json
    tensors: dict[str, Tensor]  # by names on disk
    sketch: NDArray[np.float32]  # [T, COLUMNS] of the logits over the fixture's tokens


def names() -> list[str]:
    """Return the names of all fixtures, sorted."""
    return sorted(_places())


def read_config(name: str, form: str = "config") -> dict[str, Any]:
    """Return a fixture's config; `form` "old_config" is that of older hub repositories (KeyError if there is none)."""
    config: dict[str, Any] = copy.deepcopy(_places()[name][2][form])
    return config


def all_configs() -> list[dict[str, Any]]:
    """Return the configs of all fixtures, in every stored form."""
    forms = [(name, form) for name in names() for form in ("config", "old_config") if form in _places()[name][2]]
    return [read_config(name, form) for name, form in forms]


def load_fixture(name: str) -> Fixture:
    """Read one fixture. Raise RuntimeError if this NumPy draws other weights than the fixture was made with."""
    archive, index, facts = _places()[name]
    recipe, arrays = read_arrays(archive, index)
    return Fixture(
        name=name,
        config=read_config(name),
        old_config=read_config(name, "old_config") if "old_config" in facts else None,
        prompt=arrays["tokens"][: facts["prompt"]],
        tokens=arrays["tokens"],
        sketch=arrays["sketch"],
        log_probs=arrays["log_probs"],
        tensors=_draw(name, facts, recipe),
    )


def draw_again(name: str, seed: int) -> dict[str, Tensor]:
    """Return the tensors of a fixture, drawn from another seed."""
    archive, index, facts = _places()[name]
    return read_arrays(archive, index)[0].draw(facts | {"seed": seed})


def adapter_names() -> list[str]:
    """Return the names of all adapters, sorted: FIXTURE, or FIXTURE+LABEL."""
    return sorted(read_facts(ADAPTERS))


def load_adapter(name: str) -> FixtureAdapter:
    """Read an adapter by its name. Raise RuntimeError as `load_fixture` does."""
    every = read_facts(ADAPTERS)
    recipe, arrays = read_arrays(ADAPTERS, list(every).index(name))
    return FixtureAdapter(every[name]["config"], _draw(name, every[name], recipe), arrays["sketch"])


@functools.cache
def _places() -> dict[str, tuple[Path, int, Facts]]:
    """Return the archive of each fixture, its number there, and its facts."""
    archives = [path.with_suffix("") for path in sorted(FIXTURES.glob("*.json"))]
    return {
        name: (archive, index, facts)
        for archive in archives
        for index, (name, facts) in enumerate(read_facts(archive).items())
    }


def _draw(name: str, facts: Facts, recipe: Recipe) -> dict[str, Tensor]:
    tensors = recipe.draw(facts)
    if digest(tensors) != facts["digest"]:
        raise RuntimeError(
            f"{name}: NumPy {np.__version__} draws other weights than the fixture was made with "
            f"({facts['made_with']}); run `make parity`"
        )
    return tensors
