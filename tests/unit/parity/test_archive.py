"""Files of parity fixtures: what is written is read back, and other weights than the stored ones are refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parity import load
from tests.parity.archive import NOISE, SKETCHED, Facts, Recipe, digest, read_arrays, read_facts, remade, store
from tests.parity.make_references import REFERENCES


def entry(seed: int) -> tuple[Facts, Recipe, dict[str, Any]]:
    """Return facts, tensors and arrays of a made-up fixture."""
    recipe = Recipe({"a.weight": (3, 2), "norm.weight": (2,)}, {"norm.weight": 1.0})
    facts: Facts = {"seed": seed, "scales": [["^a", 2.0]], "copies": {"b.weight": "a.weight"}}
    facts |= {"digest": digest(recipe.draw(facts)), "config": {"model_type": "made_up", "eps": 1e-6}}
    return facts, recipe, {"sketch": np.random.default_rng(seed).standard_normal((4, 12)).astype(np.float32)}


def test_fixtures_are_read_as_they_were_stored(tmp_path: Path) -> None:
    """In any order of storing; storing one again leaves the others as they are."""
    archive = tmp_path / "made_up"
    seeds = {"last": 1, "first": 2, "between": 3}
    for name in (*seeds, "first"):
        store(archive, name, *entry(seeds[name]))
    facts = read_facts(archive)
    assert list(facts) == sorted(seeds)
    for index, name in enumerate(facts):
        expected, recipe, arrays = entry(seeds[name])
        found, stacks = read_arrays(archive, index)
        assert facts[name] == expected
        assert (found.shapes, found.means) == (recipe.shapes, {"a.weight": 0.0, "norm.weight": 1.0})
        np.testing.assert_array_equal(stacks["sketch"], arrays["sketch"])
        tensors = found.draw(facts[name])
        assert digest(tensors) == expected["digest"]
        np.testing.assert_array_equal(tensors["b.weight"], tensors["a.weight"])


def test_a_fact_has_a_line(tmp_path: Path) -> None:
    """So that a diff shows which config of which fixture changed."""
    store(tmp_path / "made_up", "one", *entry(1))
    lines = (tmp_path / "made_up.json").read_text().splitlines()
    assert [line.split(":")[0].strip(' "') for line in lines] == ["{", "one", *entry(1)[0], "}", "}"]


def change_number(facts: Facts, recipe: Recipe, arrays: dict[str, Any]) -> None:
    """One number is off by more than two machines differ."""
    arrays["sketch"][2, 3] += 2 * SKETCHED * NOISE


def change_config(facts: Facts, recipe: Recipe, arrays: dict[str, Any]) -> None:
    """transformers reads or saves another config."""
    facts["config"]["eps"] = 1e-5


def change_shape(facts: Facts, recipe: Recipe, arrays: dict[str, Any]) -> None:
    """A tensor has another shape."""
    recipe.shapes["a.weight"] = (2, 3)  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (change_number, "two: sketch differ"),
        (change_config, "two: config differ"),
        (change_shape, "two: tensors differ"),
        (None, "two: only in the committed archive"),
    ],
)
def test_the_check_finds_a_fixture_that_is_made_anew_and_differs(
    change: Any, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names the fixture and what differs, exits with status 1, and leaves the committed files as they are."""
    for name, seed in (("one", 1), ("two", 2)):
        store(tmp_path / "made_up", name, *entry(seed))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(SystemExit) as ended, remade(tmp_path, check=True) as folder:  # noqa: PT012 - a context
        store(folder / "made_up", "one", *entry(1))
        if change is not None:
            parts = entry(2)
            change(*parts)
            store(folder / "made_up", "two", *parts)
    assert ended.value.code == 1
    assert capsys.readouterr().out == f"{line}\n"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_check_forgives_the_order_of_additions(tmp_path: Path) -> None:
    """And versions of packages; of a part of the fixtures only what was made anew is compared."""
    for name, seed in (("one", 1), ("two", 2)):
        store(tmp_path / "made_up", name, *entry(seed))
    facts, recipe, arrays = entry(1)
    with remade(tmp_path, check=True, keep=True) as folder:
        noisy = {"sketch": arrays["sketch"] + np.float32(NOISE * 1.8)}
        store(folder / "made_up", "one", facts | {"made_with": {"torch": "2.14"}}, recipe, noisy)


def test_every_bit_of_the_weights_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight of another sign has the same absolute mean, and is refused all the same."""
    drawn = Recipe.draw

    def flipped(self: Recipe, facts: Facts) -> dict[str, Any]:
        tensors = drawn(self, facts)
        tensors["model.norm.weight"] = -tensors["model.norm.weight"]
        return tensors

    monkeypatch.setattr(Recipe, "draw", flipped)
    with pytest.raises(RuntimeError, match=r"llama_gqa: NumPy .* draws other weights .*2\.13\.0.*make parity"):
        load.load_fixture("llama_gqa")
    monkeypatch.setattr(Recipe, "draw", lambda self, facts: {})
    with pytest.raises(RuntimeError, match="make parity"):
        load.load_adapter("llama_gqa")


def test_each_fixture_says_what_it_was_made_with() -> None:
    """Versions of torch and transformers, in text; references in NumPy have that of NumPy only."""
    references = {reference.name for reference in REFERENCES}
    for path in load.FIXTURES.glob("*.json"):
        for name, facts in read_facts(path).items():
            packages = {"numpy"} if name in references else {"numpy", "torch", "transformers"}
            assert facts["made_with"].keys() >= packages, name
            assert facts["made_with"].get("transformers") == facts["config"].get("transformers_version"), name
