"""The fixtures of drafters: their checkpoints, what they read, and the tokens that their own packages draft.

Weights and hidden states are drawn, not stored (weights.py); the drafted tokens are stored.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from tests.parity.archive import Facts, Recipe, read_arrays, read_facts
from tests.parity.weights import Tensor, write_checkpoint

ARCHIVES = Path(__file__).parent
POSITIONS, DRAFTS = 120, 3


@dataclass(frozen=True)
class DrafterFixture:
    """A drafter's checkpoint, and the tokens that it drafts behind each position of a text.

    Attributes:
        facts: `config` is its config.json.
        drafts: the tokens behind each position; row n is for a text whose last token is number n.
    """

    name: str
    facts: Facts
    tensors: dict[str, Tensor]
    drafts: Int[np.ndarray, "T K"]

    @property
    def config(self) -> dict[str, Any]:
        """The drafter's config.json."""
        config: dict[str, Any] = self.facts["config"]
        return config

    def write(self, folder: Path) -> Path:
        """Write the checkpoint."""
        write_checkpoint(folder, self.config, self.tensors)
        return folder


def load_drafters(archive: str) -> list[DrafterFixture]:
    """Return the fixtures of an archive."""
    path = ARCHIVES / archive
    fixtures = []
    for index, (name, facts) in enumerate(read_facts(path).items()):
        recipe, arrays = read_arrays(path, index)
        fixtures.append(DrafterFixture(name, facts, whole_numbers(recipe, facts), arrays["drafts"]))
    return fixtures


def whole_numbers(recipe: Recipe, facts: Facts) -> dict[str, Any]:
    """Return the tensors of a checkpoint, with those of whole numbers that `facts` describe."""
    tensors: dict[str, Any] = recipe.draw(facts)
    if (count := facts.get("draft_vocab")) is not None:
        tokens = draft_tokens(facts["vocab"], count, facts["seed"])
        tensors["d2t"] = tokens - np.arange(count)
        tensors["t2d"] = np.isin(np.arange(facts["vocab"]), tokens)
    if (centroids := facts.get("centroids")) is not None:
        order = np.random.default_rng([facts["seed"], 3]).permutation(facts["vocab"])
        tensors["masked_embedding.token_ordering"] = order.reshape(centroids, -1).reshape(-1)
    return tensors


def draft_tokens(vocab: int, count: int, seed: int) -> Int[np.ndarray, " v"]:
    """Return the tokens of a draft vocabulary, in order."""
    return np.sort(np.random.default_rng([seed, 2]).choice(vocab, count, replace=False))


def drawn_text(vocab: int, seed: int, positions: int = POSITIONS) -> Int[np.ndarray, " T"]:
    """Return the tokens of a text."""
    return np.random.default_rng([seed, 0]).integers(0, vocab, positions).astype(np.int32)


def drawn_hidden(width: int, seed: int, positions: int = POSITIONS) -> Float[np.ndarray, "T M"]:
    """Return hidden states of a target."""
    return np.random.default_rng([seed, 1]).standard_normal((positions, width)).astype(np.float32)
