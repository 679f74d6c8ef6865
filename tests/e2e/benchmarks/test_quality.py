"""`benchmarks.quality.run` on the embedded model: every configuration is exercised, and no answer differs."""

import random
from typing import Any

import pytest

from benchmarks.quality.report import markdown
from benchmarks.quality.run import CONFIGURATIONS, as_json, problems, run
from jswa.commands.task_sets import Item
from tests.support.oracles import quick_compiles

pytestmark = pytest.mark.optimized  # many steps of few programs: unoptimised ones take three times as long

WORDS = ("the", "cat", "saw", "a", "big", "dog", "in", "the", "garden", "and", "ran", "to", "the", "house")


def items(count: int, words: int, texts: int = 0) -> list[Item]:
    """Return questions behind so many words each, more than a replay has tokens, and texts."""
    choose = random.Random(0)

    def random_text(length: int) -> str:
        return " ".join(choose.choice(WORDS) for _ in range(length))

    asked = [
        Item("key", 512, f"Key {i}. {random_text(words)}. The key is", (), str(i), "exact", {}, i) for i in range(count)
    ]
    return asked + [Item("text", None, random_text(30), (), "", "bits", {}, i) for i in range(texts)]


def check(names: tuple[str, ...], asked: list[Item], tail: int, longest: int) -> dict[str, Any]:
    """Run the configurations, assert that there are no problems, and return what is written, by configuration."""
    with quick_compiles():
        outcomes, too_long = run("tiny", asked, names, tail, lambda line: None, longest)
    assert problems(outcomes) == []
    assert too_long == []
    assert [outcome.name for outcome in outcomes] == [name for name in CONFIGURATIONS if name in ("cold", *names)]
    for outcome in outcomes:
        assert len(outcome.answers) == len(asked)
        assert outcome.compared > 0
    result = as_json(outcomes, tail, {"model": "tiny", "limit": 1, "too_long": 0, "problems": []})
    assert "0 problems" in markdown(result)
    return {one["name"]: one for one in result["configurations"]}


@pytest.mark.nightly
def test_answers_from_the_cache_and_after_preemption_are_those_of_a_cold_run() -> None:
    """The evidence shows hits, rebuilt windows and preempted answers."""
    found = check(("prefix-cached", "revived", "preempted"), items(2, 320), 2, 400)
    assert found["prefix-cached"]["hits"] == found["revived"]["hits"] == 2
    assert found["revived"]["revivals"] == 2
    assert 0 < found["revived"]["rebuilt_tokens"] <= found["revived"]["replayed_tokens"]
    assert found["preempted"]["preempted_answers"] > 0


@pytest.mark.nightly
def test_answers_in_every_configuration_are_those_of_a_cold_run() -> None:
    """Also with texts, whose last tokens are forced behind cached ones."""
    found = check(CONFIGURATIONS, items(4, 700, texts=2), 4, 1280)
    assert found["prefix-cached"]["tail_bits_per_token"] == pytest.approx(
        found["cold"]["tail_bits_per_token"], abs=1e-4
    )
