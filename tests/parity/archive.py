"""The files of parity fixtures: what a person reviews is text, what no person reads is compressed.

An archive is two files that hold fixtures of one family. `NAME.json` has an object per fixture and a line per fact, so
that git shows which config changed. `NAME.npz` has the arrays of all fixtures, each stacked along a first axis in the
order of the JSON file, and the names, shapes and means of the tensors as JSON.

NumPy only: the torch side writes archives and the tests read them.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.parity.weights import Tensor, random_weights

Facts = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """Names, shapes and means of a checkpoint's tensors, from which `draw` makes their values."""

    shapes: Mapping[str, tuple[int, ...]]
    means: Mapping[str, float]

    def draw(self, facts: Facts) -> dict[str, Tensor]:
        """Return the tensors of a fixture with these facts, by name on disk."""
        tensors = random_weights(self.shapes, self.means, facts["seed"], facts.get("scales", ()))
        return tensors | {copy: tensors[source].copy() for copy, source in facts.get("copies", {}).items()}


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of all names and bits, which any other draw of the weights changes."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + np.ascontiguousarray(tensors[name]).tobytes())
    return found.hexdigest()[:16]


def read_facts(archive: Path) -> dict[str, Facts]:
    """Return the facts of every fixture of an archive, by name."""
    facts: dict[str, Facts] = json.loads(archive.with_suffix(".json").read_text())
    return facts


def read_arrays(archive: Path, index: int) -> tuple[Recipe, dict[str, NDArray[Any]]]:
    """Return the recipe of the tensors of an archive's fixture number `index`, and its arrays by name."""
    recipes, stacks = _read_stacks(archive)
    tensors = recipes[index]
    shapes = {name: tuple(shape) for name, (shape, _) in tensors.items()}
    means = {name: mean for name, (_, mean) in tensors.items()}
    return Recipe(shapes, means), {key: stack[index] for key, stack in stacks.items()}


def store(archive: Path, name: str, facts: Facts, recipe: Recipe, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Add a fixture to an archive, or replace it; the others stay as they are, bit for bit."""
    texts: dict[str, Facts] = {}
    rows: dict[str, tuple[Any, dict[str, NDArray[Any]]]] = {}
    if archive.with_suffix(".json").exists():
        texts = read_facts(archive)
        recipes, stacks = _read_stacks(archive)
        rows = {other: (recipes[i], {key: stack[i] for key, stack in stacks.items()}) for i, other in enumerate(texts)}
    texts[name] = facts
    rows[name] = {key: (shape, recipe.means.get(key, 0.0)) for key, shape in recipe.shapes.items()}, dict(arrays)
    order = sorted(texts)
    archive.parent.mkdir(parents=True, exist_ok=True)
    archive.with_suffix(".json").write_text(_lines({key: texts[key] for key in order}))
    tensors = json.dumps([rows[key][0] for key in order]).encode()
    merged: dict[str, Any] = {key: np.stack([rows[other][1][key] for other in order]) for key in arrays}
    np.savez_compressed(archive.with_suffix(".npz"), tensors=np.frombuffer(tensors, np.uint8), **merged)


def _read_stacks(archive: Path) -> tuple[list[dict[str, tuple[list[int], float]]], dict[str, NDArray[Any]]]:
    """Return the recipe of each fixture of an archive, and the arrays of all fixtures."""
    with np.load(archive.with_suffix(".npz"), allow_pickle=False) as data:
        arrays: dict[str, NDArray[Any]] = dict(data)
    return json.loads(arrays.pop("tensors").tobytes()), arrays


def _lines(fixtures: Mapping[str, Facts]) -> str:
    """Return a JSON object of objects with a line for each fact."""
    texts = []
    for name, facts in fixtures.items():
        lines = [f" {json.dumps(key)}: {json.dumps(value, sort_keys=True)}" for key, value in facts.items()]
        texts.append(f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(texts) + "\n}\n"
