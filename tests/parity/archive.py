"""The files of parity fixtures: what a person reviews is text, what no person reads is compressed.

An archive is two files that hold fixtures of one family. `NAME.json` has an object per fixture and a line per fact, so
that git shows which config changed. `NAME.npz` has the arrays of all fixtures, each stacked along a first axis in the
order of the JSON file, and the names, shapes and means of the tensors as JSON.

NumPy only: the torch side writes archives and the tests read them.
"""

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.parity.weights import Tensor, random_weights

Facts = dict[str, Any]
# Two machines add in different orders. Of this size are float32's own errors (docs/numerics.md).
NOISE = 3e-5
SKETCHED = 3.6  # times that for a sketch, each number of which adds eight logits (sketch.py)


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


@contextlib.contextmanager
def remade(folder: Path, pattern: str = "*", *, check: bool = False, keep: bool = False) -> Iterator[Path]:
    """Yield the folder to write archives to, without those whose names match the pattern, unless `keep`.

    With `check` it is a temporary folder. Its archives are compared with the committed ones afterwards, every
    difference is printed, and SystemExit is raised if there is one. `keep`: not all fixtures are made anew.
    """
    if not check:
        for path in [] if keep else [*folder.glob(f"{pattern}.json"), *folder.glob(f"{pattern}.npz")]:
            path.unlink()
        yield folder
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield (made := Path(temporary))
        both = {path.stem for place in (folder, made) for path in place.glob(f"{pattern}.json")}
        found = [line for name in sorted(both) for line in differences(folder / name, made / name, part=keep)]
    print("\n".join(found) or "all fixtures that were made anew equal the committed ones")
    if found:
        raise SystemExit(1)


def differences(committed: Path, made: Path, *, part: bool = False) -> Iterator[str]:
    """Yield a line for each fixture of an archive that was made anew and differs from the committed one.

    Facts, tensors and tokens must be equal, floating-point numbers within NOISE, sketches within SKETCHED
    times that. Versions of packages may differ.
    `part`: not all fixtures were made anew.
    """
    texts = [read_facts(path) if path.with_suffix(".json").exists() else {} for path in (committed, made)]
    for name in sorted({*texts[1], *([] if part else texts[0])}):
        if name not in texts[0] or name not in texts[1]:
            yield f"{name}: only in the {'committed' if name in texts[0] else 'new'} archive"
            continue
        old, new = ({key: x for key, x in text[name].items() if key != "made_with"} for text in texts)
        lines = [key for key in sorted({*old, *new}) if json.dumps(old.get(key)) != json.dumps(new.get(key))]
        recipes, arrays = zip(
            *(read_arrays(path, list(text).index(name)) for path, text in zip((committed, made), texts, strict=True)),
            strict=True,
        )
        lines += ["tensors"] if recipes[0] != recipes[1] else []
        lines += [
            key for key in sorted({*arrays[0], *arrays[1]}) if not _equal(key, arrays[0].get(key), arrays[1].get(key))
        ]
        if lines:
            yield f"{name}: {', '.join(lines)} differ"


def _equal(key: str, old: NDArray[Any] | None, new: NDArray[Any] | None) -> bool:
    if old is None or new is None or old.shape != new.shape or old.dtype != new.dtype:
        return False
    within = NOISE * (SKETCHED if key == "sketch" else 1)
    return bool(np.array_equal(old, new) or (old.dtype.kind == "f" and np.abs(old - new).max() <= within))


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
