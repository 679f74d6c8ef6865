"""What 16 bits cost transformers on a tiny checkpoint of each family (make.py). Without torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.parity.load import Fixture, names

ARCHIVE = Path(__file__).with_suffix("")
TYPES = ("bfloat16", "float16")
# Families without a checkpoint named `_base`. Wrapped ones are the same models by other names.
PLAIN = ("gemma3_text_layer_types", "llama_gqa", "mistral_layer_types")
# Families that transformers has not, or only under another name or with a part changed: it has no errors of theirs.
WITHOUT_ERRORS = {
    *("cohere_compass_text_base", "grug_moe_base", "iquest_q1_base", "phi4_multimodal_base", "plamo3_base"),
    *("rnj1_base", "spark2_5_base"),
}
CHECKPOINTS = tuple(sorted({*PLAIN, *(name for name in names() if name.endswith("_base"))} - WITHOUT_ERRORS))
TEXTS = 4


@dataclass(frozen=True)
class Error:
    """How far log probabilities in 16 bits are off, in nats: on average, in the middle and at most."""

    mean: float
    middle: float
    max: float


@dataclass(frozen=True)
class SixteenBits:
    """A checkpoint's log probabilities in float32, and the errors of transformers in each type."""

    expected: NDArray[np.float32]  # [TEXTS, T - 1]
    scale: float  # standard deviation of the logits
    errors: dict[str, Error]


def texts_of(fixture: Fixture) -> list[NDArray[np.int32]]:
    """Return the fixture's text, and random ones of its length."""
    rng = np.random.default_rng(16)
    others = rng.integers(3, fixture.tokens.max() + 1, (TEXTS - 1, len(fixture.tokens)))
    return [fixture.tokens, *others.astype(np.int32)]


def load_sixteen_bits(name: str) -> SixteenBits:
    """Read what is recorded of a checkpoint."""
    facts: dict[str, Any] = json.loads(ARCHIVE.with_suffix(".json").read_text())[name]
    with np.load(ARCHIVE.with_suffix(".npz"), allow_pickle=False) as data:
        expected = data[name]
    return SixteenBits(expected, facts["scale"], {dtype: Error(**facts[dtype]) for dtype in TYPES})
